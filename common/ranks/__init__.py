"""Ranks: launching, rendezvous, and JSON messages between them.

`local_launcher` forks the ranks of this machine; `rendezvous` connects them and defines `World`.
"""
