CREATE TABLE control (
	name TEXT COLLATE "C" NOT NULL,
	value TEXT COLLATE "C" NOT NULL,
	PRIMARY KEY (name)
);
CREATE TABLE credentials (
	role TEXT COLLATE "C" NOT NULL,
	sha256 TEXT COLLATE "C" NOT NULL,
	PRIMARY KEY (role)
);
CREATE TABLE datasets (
	dataset_id TEXT COLLATE "C" NOT NULL,
	name TEXT COLLATE "C" NOT NULL,
	length BIGINT NOT NULL,
	weight BIGINT NOT NULL,
	PRIMARY KEY (dataset_id)
);
CREATE TABLE generations (
	number BIGINT NOT NULL,
	created_wall DOUBLE PRECISION NOT NULL,
	members TEXT COLLATE "C" NOT NULL,
	PRIMARY KEY (number)
);
CREATE TABLE groups (
	number BIGINT NOT NULL,
	created_wall DOUBLE PRECISION NOT NULL,
	members TEXT COLLATE "C" NOT NULL,
	step BIGINT NOT NULL,
	decided BIGINT NOT NULL,
	goes_on BOOLEAN NOT NULL,
	is_over BOOLEAN NOT NULL,
	PRIMARY KEY (number)
);
CREATE TABLE manifests (
	version BIGINT NOT NULL,
	sha256 TEXT COLLATE "C" NOT NULL,
	body TEXT COLLATE "C" NOT NULL,
	from_round BIGINT NOT NULL,
	PRIMARY KEY (version),
	UNIQUE (sha256)
);
CREATE TABLE queues (
	name TEXT COLLATE "C" NOT NULL,
	length BIGINT,
	units BIGINT,
	unit_rows BIGINT,
	issued BYTEA,
	done BYTEA,
	PRIMARY KEY (name)
);
CREATE TABLE runs (
	run_id TEXT COLLATE "C" NOT NULL,
	created_wall DOUBLE PRECISION NOT NULL,
	initial_sha256 TEXT COLLATE "C" NOT NULL,
	PRIMARY KEY (run_id)
);
CREATE TABLE saves (
	group_number BIGINT NOT NULL,
	step BIGINT NOT NULL,
	rank BIGINT NOT NULL,
	own TEXT COLLATE "C" NOT NULL,
	predecessor TEXT COLLATE "C" NOT NULL,
	PRIMARY KEY (group_number, step, rank)
);
CREATE TABLE schema_version (
	version BIGINT NOT NULL,
	PRIMARY KEY (version)
);
CREATE TABLE snapshots (
	version BIGINT NOT NULL,
	master_sha256 TEXT COLLATE "C" NOT NULL,
	published_sha256 TEXT COLLATE "C" NOT NULL,
	slots_sha256 TEXT COLLATE "C" NOT NULL,
	PRIMARY KEY (version)
);
CREATE TABLE workers (
	worker_id TEXT COLLATE "C" NOT NULL,
	key_sha256 TEXT COLLATE "C" NOT NULL,
	incarnation BIGINT NOT NULL,
	active BOOLEAN NOT NULL,
	registered_wall DOUBLE PRECISION NOT NULL,
	PRIMARY KEY (worker_id)
);
CREATE TABLE evaluations (
	version BIGINT NOT NULL,
	worker_id TEXT COLLATE "C" NOT NULL,
	loss_sum DOUBLE PRECISION NOT NULL,
	tokens BIGINT NOT NULL,
	PRIMARY KEY (version, worker_id),
	FOREIGN KEY(worker_id) REFERENCES workers (worker_id)
);
CREATE TABLE rounds (
	round BIGINT NOT NULL,
	state TEXT COLLATE "C" NOT NULL,
	manifest_sha256 TEXT COLLATE "C" NOT NULL,
	cursor BIGINT NOT NULL,
	fragment BIGINT NOT NULL,
	tokens BIGINT NOT NULL,
	prev_hash TEXT COLLATE "C",
	hash TEXT COLLATE "C",
	master_digest TEXT COLLATE "C",
	published_digest TEXT COLLATE "C",
	leaves BYTEA,
	published_leaves BYTEA,
	published_wall DOUBLE PRECISION,
	PRIMARY KEY (round),
	CHECK (state IN ('planned', 'open', 'frozen', 'published')),
	FOREIGN KEY(manifest_sha256) REFERENCES manifests (sha256)
);
CREATE TABLE checkpoints (
	round BIGINT NOT NULL,
	step BIGINT NOT NULL,
	group_number BIGINT NOT NULL,
	members TEXT COLLATE "C" NOT NULL,
	parts TEXT COLLATE "C" NOT NULL,
	blobs TEXT COLLATE "C" NOT NULL,
	rows BIGINT NOT NULL,
	tokens BIGINT NOT NULL,
	loss_sum DOUBLE PRECISION NOT NULL,
	late TEXT COLLATE "C" NOT NULL,
	PRIMARY KEY (round),
	FOREIGN KEY(round) REFERENCES rounds (round)
);
CREATE TABLE contributions (
	round BIGINT NOT NULL,
	worker_id TEXT COLLATE "C" NOT NULL,
	applied BIGINT NOT NULL,
	first BIGINT NOT NULL,
	fragment BIGINT NOT NULL,
	base TEXT COLLATE "C" NOT NULL,
	incarnation BIGINT NOT NULL,
	sha256 TEXT COLLATE "C" NOT NULL,
	nbytes BIGINT NOT NULL,
	weight BIGINT NOT NULL,
	rows BIGINT NOT NULL,
	tokens BIGINT NOT NULL,
	loss_sum DOUBLE PRECISION NOT NULL,
	norm DOUBLE PRECISION NOT NULL,
	residual DOUBLE PRECISION NOT NULL,
	carried BIGINT NOT NULL,
	receipt TEXT COLLATE "C" NOT NULL,
	accepted_wall DOUBLE PRECISION NOT NULL,
	PRIMARY KEY (round, worker_id),
	CHECK (first <= round AND round <= applied),
	FOREIGN KEY(round) REFERENCES rounds (round),
	FOREIGN KEY(worker_id) REFERENCES workers (worker_id),
	FOREIGN KEY(applied) REFERENCES rounds (round)
);
CREATE INDEX contributions_by_applied ON contributions (applied);
CREATE TABLE leases (
	round BIGINT NOT NULL,
	worker_id TEXT COLLATE "C" NOT NULL,
	start BIGINT NOT NULL,
	stop BIGINT NOT NULL,
	state TEXT COLLATE "C" NOT NULL,
	dataset_id TEXT COLLATE "C" NOT NULL,
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
	worker_id TEXT COLLATE "C" NOT NULL,
	part TEXT COLLATE "C" NOT NULL,
	blob TEXT COLLATE "C" NOT NULL,
	nbytes BIGINT NOT NULL,
	loss_sum DOUBLE PRECISION NOT NULL,
	tokens BIGINT NOT NULL,
	evaluation_loss DOUBLE PRECISION NOT NULL,
	evaluation_tokens BIGINT NOT NULL,
	late TEXT COLLATE "C" NOT NULL,
	PRIMARY KEY (round, group_number, rank),
	FOREIGN KEY(round) REFERENCES rounds (round),
	FOREIGN KEY(worker_id) REFERENCES workers (worker_id)
);
