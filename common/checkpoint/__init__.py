"""State on disk: what a run saves, when it saves, and how it resumes.

`storage` publishes complete checkpoints; `train_state` defines the state of a run;
in `save_or_stop` all ranks vote on saving.
"""
