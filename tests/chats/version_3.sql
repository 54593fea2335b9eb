-- A chat database of version 3 (messages in a line, ordered by position), as its app wrote it.
BEGIN TRANSACTION;
CREATE TABLE chats (
            id TEXT PRIMARY KEY,
            title TEXT NOT NULL DEFAULT '',
            created REAL NOT NULL,
            updated REAL NOT NULL,
            model TEXT NOT NULL DEFAULT '',
            system_prompt TEXT NOT NULL DEFAULT ''
        , version INTEGER NOT NULL DEFAULT 0, sides TEXT NOT NULL DEFAULT '');
INSERT INTO "chats" VALUES('e5ca73b11aefe4c1','Decoding speed',1780000000.0,1780000540.0,'Qwen','Be brief.',6,'');
INSERT INTO "chats" VALUES('8663eab9e01d5db5','Quinoa',1780000240.0,1780000480.0,'Qwen','',2,'');
INSERT INTO "chats" VALUES('caeb2eeea7d8b6e8','Q8_0 against Q4_K_M · threads 2: Why?',1780000600.0,1780000780.0,'Qwen Q8_0','',3,'[{"path":"/m/q8.gguf","changes":{},"model":"Qwen","quantization":"Q8_0"},{"path":"/m/q4.gguf","changes":{"threads":"2"},"model":"Qwen","quantization":"Q4_K_M"}]');
CREATE TABLE messages (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            chat_id TEXT NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
            position INTEGER NOT NULL,
            role TEXT NOT NULL CHECK (role IN ('system', 'user', 'assistant')),
            content TEXT NOT NULL DEFAULT '',
            reasoning TEXT NOT NULL DEFAULT '',
            model TEXT NOT NULL DEFAULT '',
            stop_reason TEXT,
            timings TEXT,
            created REAL NOT NULL,
            UNIQUE (chat_id, position)
        );
INSERT INTO "messages" VALUES(1,'e5ca73b11aefe4c1',0,'user','Why is decoding slow?','','',NULL,NULL,1780000060.0);
INSERT INTO "messages" VALUES(3,'8663eab9e01d5db5',0,'user','How long?','','',NULL,NULL,1780000300.0);
INSERT INTO "messages" VALUES(4,'e5ca73b11aefe4c1',1,'assistant','Because of bandwidth.','Hm.','Qwen','end','{"cache_n":0,"prompt_n":0,"prompt_ms":0.0,"predicted_n":7,"predicted_ms":0.0,"ttft_ms":12.5,"draft_n":0,"draft_n_accepted":0,"n_past":0,"n_ctx":0,"seed":0,"overhead_us":0.0,"cpu_wait":null,"speculation":null}',1780000360.0);
INSERT INTO "messages" VALUES(5,'e5ca73b11aefe4c1',2,'user','And prefill?','','',NULL,NULL,1780000420.0);
INSERT INTO "messages" VALUES(6,'8663eab9e01d5db5',1,'assistant','Fifteen min','','Qwen','cancelled',NULL,1780000480.0);
INSERT INTO "messages" VALUES(7,'e5ca73b11aefe4c1',3,'assistant','That is compute.','','Qwen','end','{"cache_n":0,"prompt_n":0,"prompt_ms":0.0,"predicted_n":4,"predicted_ms":0.0,"ttft_ms":0.0,"draft_n":0,"draft_n_accepted":0,"n_past":0,"n_ctx":0,"seed":0,"overhead_us":0.0,"cpu_wait":null,"speculation":null}',1780000540.0);
INSERT INTO "messages" VALUES(8,'caeb2eeea7d8b6e8',0,'user','Why?','','',NULL,NULL,1780000660.0);
INSERT INTO "messages" VALUES(9,'caeb2eeea7d8b6e8',1,'assistant','Bytes.','','Qwen Q8_0','end','{"cache_n":0,"prompt_n":42,"prompt_ms":160.3053435114504,"predicted_n":1,"predicted_ms":0.0,"ttft_ms":210.0,"draft_n":0,"draft_n_accepted":0,"n_past":43,"n_ctx":8192,"seed":7,"overhead_us":0.0,"cpu_wait":null,"speculation":null}',1780000720.0);
INSERT INTO "messages" VALUES(10,'caeb2eeea7d8b6e8',2,'assistant','Because of bytes.','','Qwen Q4_K_M · threads 2','end','{"cache_n":0,"prompt_n":42,"prompt_ms":160.3053435114504,"predicted_n":3,"predicted_ms":50.0,"ttft_ms":210.0,"draft_n":0,"draft_n_accepted":0,"n_past":45,"n_ctx":8192,"seed":7,"overhead_us":0.0,"cpu_wait":null,"speculation":null}',1780000780.0);
CREATE VIRTUAL TABLE messages_fts USING fts5 (content, content='messages', content_rowid='id', tokenize='unicode61 remove_diacritics 2');
INSERT INTO messages_fts (messages_fts) VALUES ('rebuild');
CREATE TABLE quarantine (
            id INTEGER PRIMARY KEY,
            chat_id TEXT REFERENCES chats (id) ON DELETE CASCADE,
            source TEXT NOT NULL,
            row TEXT NOT NULL,
            found REAL NOT NULL
        );
CREATE INDEX chats_by_time ON chats (updated);
CREATE INDEX messages_unfinished ON messages (id) WHERE role = 'assistant' AND stop_reason IS NULL;
CREATE TRIGGER fts_insert AFTER INSERT ON messages BEGIN INSERT INTO messages_fts (rowid, content) SELECT new.id, new.content WHERE (new.role <> 'assistant' OR new.stop_reason IS NOT NULL); END;
CREATE TRIGGER fts_delete AFTER DELETE ON messages BEGIN INSERT INTO messages_fts (messages_fts, rowid, content) SELECT 'delete', old.id, old.content WHERE (old.role <> 'assistant' OR old.stop_reason IS NOT NULL); END;
CREATE TRIGGER fts_update AFTER UPDATE OF content, stop_reason ON messages BEGIN INSERT INTO messages_fts (messages_fts, rowid, content) SELECT 'delete', old.id, old.content WHERE (old.role <> 'assistant' OR old.stop_reason IS NOT NULL); INSERT INTO messages_fts (rowid, content) SELECT new.id, new.content WHERE (new.role <> 'assistant' OR new.stop_reason IS NOT NULL); END;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('messages',10);
COMMIT;
PRAGMA user_version = 3;
