"""Loading a model as the options say: its device, type, weights and experts."""
