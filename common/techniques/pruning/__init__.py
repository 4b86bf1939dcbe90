"""Pruning: masks, schedules, and the savings of a pruned network."""
