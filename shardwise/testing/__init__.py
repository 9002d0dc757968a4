"""Tools with which users property-test their own models and plans."""
