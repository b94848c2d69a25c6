"""Native kernels: C++ sources that are compiled on the machine that runs them."""
