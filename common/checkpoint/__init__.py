"""Checkpoints: what a run saves, when it saves, and how it resumes.

This package knows no technique: a technique passes its state to `train_state.TrainState` (`local_part.LocalPart`), or
derives a class from it. `saver.Saver` saves and loads checkpoints, `storage` reads and writes checkpoint folders, and
`save_or_stop_vote` implements the vote in which all ranks decide whether to save a checkpoint and whether to stop. The
trained model's file is written by `common.models.model_file`.
"""
