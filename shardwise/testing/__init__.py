"""Tools with which users test their own models and plans: oracles, equivalence, ledgers.

Not part of `import shardwise`; import it by name. `shardwise.testing.strategies` needs hypothesis
(the `testing` extra), the rest does not.
"""

from shardwise.testing.oracles import Step, split_reference, unsharded_run

__all__ = ["Step", "split_reference", "unsharded_run"]
