"""`plan`: what `optimize` would do, without a step being run.

Enters: a model, perhaps on the `meta` device, a batch of any contents, a budget. Leaves: a
`Report`. Guarantees: no memory of the model's size is allocated; for a device that is here, the
plan is the one that `optimize` makes, since the same stages make it.
"""

from autoremat.offline.asking import asked as asked
from autoremat.offline.call import plan as plan
from autoremat.offline.step import OfflineStep as OfflineStep
from autoremat.offline.step import planned_session as planned_session
