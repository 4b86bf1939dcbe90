"""Networks, dropout, initial weights, and the files and exports of trained models.

`networks` defines the networks, each an `nn.Sequential`, and `custom_network` builds the class of a user's file.
`weights` loads initial weights. `model_file` writes, reads and builds trained models, and
initializes a network (`init_network`). `exporting` converts a trained model for other programs. This package does not
split or wrap models; techniques do.
"""
