"""Tests of autoremat and autoremat_solver."""
