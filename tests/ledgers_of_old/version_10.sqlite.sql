CREATE TABLE control (
	name TEXT NOT NULL,
	value TEXT NOT NULL,
	PRIMARY KEY (name)
);
CREATE TABLE credentials (
	role TEXT NOT NULL,
	sha256 TEXT NOT NULL,
	PRIMARY KEY (role)
);
CREATE TABLE datasets (
	dataset_id TEXT NOT NULL,
	name TEXT NOT NULL,
	length BIGINT NOT NULL,
	weight BIGINT NOT NULL,
	PRIMARY KEY (dataset_id)
);
CREATE TABLE generations (
	number BIGINT NOT NULL,
	created_wall DOUBLE NOT NULL,
	members TEXT NOT NULL,
	PRIMARY KEY (number)
);
CREATE TABLE groups (
	number BIGINT NOT NULL,
	created_wall DOUBLE NOT NULL,
	members TEXT NOT NULL,
	step BIGINT NOT NULL,
	decided BIGINT NOT NULL,
	goes_on BOOLEAN NOT NULL,
	is_over BOOLEAN NOT NULL,
	PRIMARY KEY (number)
);
CREATE TABLE manifests (
	version BIGINT NOT NULL,
	sha256 TEXT NOT NULL,
	body TEXT NOT NULL,
	from_round BIGINT NOT NULL,
	PRIMARY KEY (version),
	UNIQUE (sha256)
);
CREATE TABLE queues (
	name TEXT NOT NULL,
	length BIGINT,
	units BIGINT,
	unit_rows BIGINT,
	issued BLOB,
	done BLOB,
	PRIMARY KEY (name)
);
CREATE TABLE runs (
	run_id TEXT NOT NULL,
	created_wall DOUBLE NOT NULL,
	initial_sha256 TEXT NOT NULL,
	PRIMARY KEY (run_id)
);
CREATE TABLE saves (
	group_number BIGINT NOT NULL,
	step BIGINT NOT NULL,
	rank BIGINT NOT NULL,
	own TEXT NOT NULL,
	predecessor TEXT NOT NULL,
	PRIMARY KEY (group_number, step, rank)
);
CREATE TABLE schema_version (
	version BIGINT NOT NULL,
	PRIMARY KEY (version)
);
CREATE TABLE snapshots (
	version BIGINT NOT NULL,
	master_sha256 TEXT NOT NULL,
	published_sha256 TEXT NOT NULL,
	slots_sha256 TEXT NOT NULL,
	PRIMARY KEY (version)
);
CREATE TABLE workers (
	worker_id TEXT NOT NULL,
	key_sha256 TEXT NOT NULL,
	incarnation BIGINT NOT NULL,
	active BOOLEAN NOT NULL,
	registered_wall DOUBLE NOT NULL,
	PRIMARY KEY (worker_id)
);
CREATE TABLE evaluations (
	version BIGINT NOT NULL,
	worker_id TEXT NOT NULL,
	loss_sum DOUBLE NOT NULL,
	tokens BIGINT NOT NULL,
	PRIMARY KEY (version, worker_id),
	FOREIGN KEY(worker_id) REFERENCES workers (worker_id)
);
CREATE TABLE rounds (
	round BIGINT NOT NULL,
	state TEXT NOT NULL,
	manifest_sha256 TEXT NOT NULL,
	cursor BIGINT NOT NULL,
	fragment BIGINT NOT NULL,
	tokens BIGINT NOT NULL,
	prev_hash TEXT,
	hash TEXT,
	master_digest TEXT,
	published_digest TEXT,
	leaves BLOB,
	published_leaves BLOB,
	published_wall DOUBLE,
	PRIMARY KEY (round),
	CHECK (state IN ('planned', 'open', 'frozen', 'published')),
	FOREIGN KEY(manifest_sha256) REFERENCES manifests (sha256)
);
CREATE TABLE checkpoints (
	round BIGINT NOT NULL,
	step BIGINT NOT NULL,
	group_number BIGINT NOT NULL,
	members TEXT NOT NULL,
	parts TEXT NOT NULL,
	blobs TEXT NOT NULL,
	rows BIGINT NOT NULL,
	tokens BIGINT NOT NULL,
	loss_sum DOUBLE NOT NULL,
	late TEXT NOT NULL,
	PRIMARY KEY (round),
	FOREIGN KEY(round) REFERENCES rounds (round)
);
CREATE TABLE contributions (
	round BIGINT NOT NULL,
	worker_id TEXT NOT NULL,
	applied BIGINT NOT NULL,
	first BIGINT NOT NULL,
	fragment BIGINT NOT NULL,
	base TEXT NOT NULL,
	incarnation BIGINT NOT NULL,
	sha256 TEXT NOT NULL,
	nbytes BIGINT NOT NULL,
	weight BIGINT NOT NULL,
	rows BIGINT NOT NULL,
	tokens BIGINT NOT NULL,
	loss_sum DOUBLE NOT NULL,
	norm DOUBLE NOT NULL,
	residual DOUBLE NOT NULL,
	carried BIGINT NOT NULL,
	receipt TEXT NOT NULL,
	accepted_wall DOUBLE NOT NULL,
	PRIMARY KEY (round, worker_id),
	CHECK (first <= round AND round <= applied),
	FOREIGN KEY(round) REFERENCES rounds (round),
	FOREIGN KEY(worker_id) REFERENCES workers (worker_id),
	FOREIGN KEY(applied) REFERENCES rounds (round)
);
CREATE INDEX contributions_by_applied ON contributions (applied);
CREATE TABLE leases (
	round BIGINT NOT NULL,
	worker_id TEXT NOT NULL,
	start BIGINT NOT NULL,
	stop BIGINT NOT NULL,
	state TEXT NOT NULL,
	dataset_id TEXT NOT NULL,
	shuffle_seed BIGINT NOT NULL,
	epoch BIGINT NOT NULL,
	unit BIGINT NOT NULL,
	lease_epoch BIGINT NOT NULL,
	incarnation BIGINT NOT NULL,
	PRIMARY KEY (round, worker_id, start, dataset_id, lease_epoch),
	CHECK (start >= 0 AND start < stop),
	CHECK (state IN ('leased', 'done', 'reopened', 'taken', 'given_up')),
	FOREIGN KEY(round) REFERENCES rounds (round),
	FOREIGN KEY(worker_id) REFERENCES workers (worker_id)
);
CREATE INDEX leases_by_state ON leases (state);
CREATE INDEX leases_by_stop ON leases (dataset_id, stop);
CREATE TABLE parts (
	round BIGINT NOT NULL,
	group_number BIGINT NOT NULL,
	rank BIGINT NOT NULL,
	worker_id TEXT NOT NULL,
	part TEXT NOT NULL,
	blob TEXT NOT NULL,
	nbytes BIGINT NOT NULL,
	loss_sum DOUBLE NOT NULL,
	tokens BIGINT NOT NULL,
	evaluation_loss DOUBLE NOT NULL,
	evaluation_tokens BIGINT NOT NULL,
	late TEXT NOT NULL,
	PRIMARY KEY (round, group_number, rank),
	FOREIGN KEY(round) REFERENCES rounds (round),
	FOREIGN KEY(worker_id) REFERENCES workers (worker_id)
);
