"""Recovery of a training step after a rank was lost."""
