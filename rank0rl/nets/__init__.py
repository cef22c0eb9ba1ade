"""Networks, policies, value functions, normalizers, optimizers. No MPI, no files."""
