-- How a file of version 4 reads as one of this version, for those who may only read. Temporary views hide the tables.
-- They are made of what has the same name and columns in this version too: the file may be brought up to date meanwhile.

CREATE TEMP VIEW IF NOT EXISTS runs AS SELECT rowid AS number, * FROM main.runs;
CREATE TEMP VIEW IF NOT EXISTS messages AS
SELECT *, 0 AS part, NULL AS data, NULL AS data_sha256 FROM main.messages;

CREATE TEMP VIEW given_tasks AS
SELECT r.number << 32 | t.position AS id, r.number AS run, t.task_id, t.answers, t.spec, t.prompt
FROM tasks AS t JOIN runs AS r USING (run_id);

CREATE TEMP VIEW starts AS
SELECT r.number << 32 | a.started_seq AS id, r.number << 32 | t.position AS task, a.attempt, a.backend, a.started_at
FROM attempts AS a JOIN tasks AS t USING (run_id, task_id) JOIN runs AS r USING (run_id);

CREATE TEMP VIEW ends AS
SELECT r.number << 32 | a.started_seq AS id, r.number << 32 | a.ended_seq AS came, a.status, a.ended_at, a.input_tokens,
    a.output_tokens, a.error, t.question, t.asked, t.text_sha256, t.data_sha256, t.text, t.data, NULL AS prompt_sha256,
    NULL AS prompt
FROM attempts AS a JOIN runs AS r USING (run_id)
    LEFT JOIN tasks AS t ON t.run_id = a.run_id AND t.task_id = a.task_id AND t.attempt = a.attempt
WHERE a.status <> 'running';

CREATE TEMP VIEW said AS
SELECT r.number << 32 | m.seq AS id, m.content_sha256, m.content FROM messages AS m JOIN runs AS r USING (run_id);
