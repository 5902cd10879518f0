-- Version 4. Which model answered is kept with each attempt. Large settings of a run, which hold its inputs and may have
-- many megabytes, are kept as other large texts are: the row of a run is written anew with every batch.

ALTER TABLE runs ADD COLUMN settings_sha256 BLOB REFERENCES blobs (sha256);  -- settings is '' then
CREATE INDEX runs_settings_sha256 ON runs (settings_sha256) WHERE settings_sha256 IS NOT NULL;

ALTER TABLE tasks ADD COLUMN model TEXT;  -- as the backend names it; NULL where that is not known
ALTER TABLE earlier_attempts ADD COLUMN model TEXT;

DROP TRIGGER keep_earlier_attempt;
DROP VIEW attempts;

-- When a task starts again, its row turns to the new attempt; the one before is kept here.
CREATE TRIGGER keep_earlier_attempt AFTER UPDATE OF attempt ON tasks
WHEN old.attempt > 0 AND new.attempt <> old.attempt
BEGIN
    INSERT INTO earlier_attempts (
        run_id, task_id, attempt, status, backend, session_id, started_at, started_seq, ended_at, ended_seq,
        error_kind, error, input_tokens, output_tokens, cost_usd, duration_s, model)
    VALUES (
        old.run_id, old.task_id, old.attempt, old.attempt_status, old.attempt_backend, old.session_id,
        old.started_at, old.started_seq, old.ended_at, old.ended_seq, old.error_kind, old.error,
        old.input_tokens, old.output_tokens, old.cost_usd, old.duration_s, old.model);
END;

-- Every attempt of every task, for reading.
CREATE VIEW attempts AS
SELECT run_id, task_id, attempt, status, backend, model, session_id, started_at, ended_at, error_kind, error,
    input_tokens, output_tokens, cost_usd, duration_s, started_seq, ended_seq
FROM earlier_attempts
UNION ALL
SELECT run_id, task_id, attempt, attempt_status, attempt_backend, model, session_id, started_at, ended_at, error_kind, error,
    input_tokens, output_tokens, cost_usd, duration_s, started_seq, ended_seq
FROM tasks WHERE attempt > 0;

PRAGMA user_version = 4;
