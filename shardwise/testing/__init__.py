"""Tools with which users test their own models and plans: oracles, equivalence, ledgers.

Not part of `import shardwise`; import it by name. `shardwise.testing.strategies` needs hypothesis
(the `testing` extra), the rest does not.
"""

from shardwise.testing.compare import EquivalenceError, tolerance
from shardwise.testing.equivalence import assert_bitwise, assert_equivalent
from shardwise.testing.ledger import Usage, measure, rest_bytes
from shardwise.testing.oracles import Step, split_reference, unsharded_run
from shardwise.testing.recorder import CommsError, assert_comms

__all__ = [
    "CommsError",
    "EquivalenceError",
    "Step",
    "Usage",
    "assert_bitwise",
    "assert_comms",
    "assert_equivalent",
    "measure",
    "rest_bytes",
    "split_reference",
    "tolerance",
    "unsharded_run",
]
