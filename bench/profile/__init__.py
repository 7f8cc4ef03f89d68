"""What kernels are made of, what bounds them, and where the time of a call goes."""
