"""What a layout is: mesh, axes, spec, plan, and the movement of tensors between layouts."""
