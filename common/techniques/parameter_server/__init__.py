"""The parameter server: serving ranks, worker ranks, their state and their report."""
