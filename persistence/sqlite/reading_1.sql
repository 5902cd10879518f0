-- How a file of version 1 reads as one of this version, for those who may only read. Temporary views hide the tables.
-- Later `reading_*.sql` follow, and leave the views that are there already.

CREATE TEMP VIEW tasks AS
SELECT *, 0 AS crashes, 0 AS session_confirmed, NULL AS question, NULL AS text_sha256, NULL AS data_sha256,
    NULL AS asked, NULL AS answers, NULL AS added_by, NULL AS model,
    (SELECT json_group_array(depends_on) FROM (
        SELECT depends_on FROM main.dependencies AS d
        WHERE d.run_id = t.run_id AND d.task_id = t.task_id ORDER BY d.position)) AS depends_on
FROM main.tasks AS t;
CREATE TEMP VIEW messages AS
SELECT *, NULL AS content_sha256, 0 AS part FROM main.messages;
CREATE TEMP VIEW notes AS
SELECT NULL AS run_id, 0 AS number, NULL AS kind, NULL AS at, NULL AS task_id, NULL AS body WHERE false;
CREATE TEMP VIEW blobs AS SELECT NULL AS sha256, 0 AS size, NULL AS content WHERE false;
