"""Conversations: from the columns of a record to turns, and from turns to the text of a template."""
