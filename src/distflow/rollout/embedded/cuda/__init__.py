"""Asynchronous decode steps of the embedded engine on a device: the host launches them and reads their tokens later."""
