"""Ranks and process groups: launching, rendezvous, collectives, DDP, and synchronized BatchNorm.

`local_launcher` forks the ranks on this machine. `rendezvous` connects the ranks and defines `World`.
"""
