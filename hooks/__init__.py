"""Capture: hooks into torch that write the black box of a rank."""
