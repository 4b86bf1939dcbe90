"""Built-in backend for torch.distributed, with collectives and messages over the links of this project."""
