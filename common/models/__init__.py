"""Networks, dropout, initial weights, and the files and exports of trained models."""
