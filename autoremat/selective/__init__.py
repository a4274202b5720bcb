"""A budget for models that are not compiled: which operators selective checkpoints are to save.

Enters: a model, a batch of any contents, a budget. Leaves: a `SelectivePolicy`, which gives each of
the model's repeated blocks a `context_fn` for `torch.utils.checkpoint`. Guarantees: no step is run
and no memory of the model's size is allocated; the peak that is predicted is that of the step as
eager mode runs it, checkpoints included, followed operator by operator on tensors without contents.
"""

from autoremat.selective.call import selective_checkpoints as selective_checkpoints
from autoremat.selective.policy import BlockPolicy as BlockPolicy
from autoremat.selective.policy import OperatorCall as OperatorCall
from autoremat.selective.policy import SelectivePolicy as SelectivePolicy
