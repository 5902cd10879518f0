-- How a file of version 3 reads as one of this version, for those who may only read. Temporary views hide the tables.

CREATE TEMP VIEW IF NOT EXISTS runs AS SELECT rowid AS number, *, NULL AS settings_sha256 FROM main.runs;
CREATE TEMP VIEW IF NOT EXISTS tasks AS SELECT *, NULL AS model FROM main.tasks;
CREATE TEMP VIEW attempts AS SELECT *, NULL AS model FROM main.attempts;
