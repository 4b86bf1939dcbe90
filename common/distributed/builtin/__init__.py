"""The built-in backend of torch.distributed: collectives and messages over this project's own links."""
