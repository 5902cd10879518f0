"""The rows of a store in tables: the effect of each change on the rows, their checksums, and the records of rows.

Nothing here executes a statement; SQLite and PostgreSQL do that, each in its own package.
"""
