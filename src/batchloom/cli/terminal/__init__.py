"""Terminal helpers of the commands: console, previews, and shared options.

Read `console.py` first.
"""
