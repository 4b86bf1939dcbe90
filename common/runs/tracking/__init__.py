"""W&B tracking: the tracking process, and the conversion to offline runs. This package does not import torch."""
