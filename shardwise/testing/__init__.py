"""Tools with which users test their own models and plans: oracles, equivalence, ledgers.

Not part of `import shardwise`; import it by name. `shardwise.testing.strategies` needs hypothesis
(the `testing` extra), the rest does not.
"""

from shardwise.testing.compare import EquivalenceError, tolerance
from shardwise.testing.equivalence import assert_bitwise, assert_equivalent
from shardwise.testing.oracles import Step, split_reference, unsharded_run

__all__ = [
    "EquivalenceError",
    "Step",
    "assert_bitwise",
    "assert_equivalent",
    "split_reference",
    "tolerance",
    "unsharded_run",
]
