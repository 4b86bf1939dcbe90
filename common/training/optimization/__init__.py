"""Layer-wise optimizers (LARS, LAMB), and the files of a custom optimizer and learning rate decay."""
