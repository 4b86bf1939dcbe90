"""Ranks and process groups: launching, rendezvous, DDP, BatchNorm statistics, collectives.

`local_launcher` forks the ranks of this machine; `rendezvous` connects them and defines `World`.
"""
