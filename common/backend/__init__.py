"""The built-in backend of torch.distributed: links (sockets, TLS), all-reduce algorithms and their cost model.

`process_group` is the backend; `algorithms` and `builders` define all-reduce algorithms as data.
"""
