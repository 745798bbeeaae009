"""Runs in the fork server and the isolated processes. Imports the standard library only: nothing else is there."""
