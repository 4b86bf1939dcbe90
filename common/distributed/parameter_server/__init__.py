"""The parameter server: serving ranks, worker ranks and their report."""
