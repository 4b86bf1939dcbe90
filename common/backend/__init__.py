"""A custom backend for torch.distributed: links over sockets and TLS, all-reduce algorithms, and a cost model.

`process_group` implements the backend. `algorithms` and `builders` represent all-reduce algorithms as lists of moves.
"""
