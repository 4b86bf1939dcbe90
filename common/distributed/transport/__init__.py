"""Links between ranks (sockets, TLS, shared memory), all-reduce algorithms, and a cost model of these algorithms.

The modules of this package do not import torch.
"""
