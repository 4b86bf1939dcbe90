"""Custom data sets, optimizers and schedules, as users write them."""
