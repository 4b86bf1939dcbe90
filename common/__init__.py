"""What the experiments share: configuration, data, models, splits, pipeline, launch, run, tracking."""
