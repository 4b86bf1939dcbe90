"""Links between ranks: one connection per direction, through sockets or through shared memory within a host.

This package does not import torch. The entry point is `connecting.connect_ranks`. Encryption is passed in as an object.
"""
