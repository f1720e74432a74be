"""numpy's .npz: a stored zip of .npy arrays."""
