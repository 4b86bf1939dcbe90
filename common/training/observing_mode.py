"""Base class of modes that observe the operations of a training step."""

from __future__ import annotations

import sys

from torch.utils._python_dispatch import TorchDispatchMode


class ObservingMode(TorchDispatchMode):
    """Mode that does not import torch._dynamo, which takes seconds, unless something else has imported it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return whether torch prevents the compilation of `__torch_dispatch__`, for which it imports torch._dynamo.

        torch calls this method when a subclass is defined.
        """
        return "torch._dynamo" in sys.modules
