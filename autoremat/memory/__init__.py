"""Bytes of the running process: what was measured, what is resident, what an optimizer adds."""
