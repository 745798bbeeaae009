"""Runs in the fork server and the isolated processes. Imports only the standard library; nothing
else is available."""
