"""Checkpoints: what a run saves, when it saves, and how it resumes.

The module `storage` reads and writes checkpoint folders. The module `train_state` defines the state
that a checkpoint contains. The module `save_or_stop` implements the vote in which all ranks decide whether to save a
checkpoint and whether to stop.
"""
