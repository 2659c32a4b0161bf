BEGIN TRANSACTION;
CREATE TABLE code_versions (
	computation TEXT NOT NULL, 
	code_version INTEGER NOT NULL, 
	code_hash TEXT NOT NULL, 
	recorded_us BIGINT NOT NULL, 
	CONSTRAINT pk_code_versions PRIMARY KEY (computation, code_version)
);
INSERT INTO "code_versions" VALUES('visits',1,'1c899b2429d5b9ad4ec82ed267f89da81d49bd82a095c35b3d25dfe41c7fd0d2',1704067200000000);
INSERT INTO "code_versions" VALUES('tally',1,'c9ff075346ad7a6926b1d36342fe2e71556e9f44853e8435bed7c2b569c22fbe',1704067200000000);
INSERT INTO "code_versions" VALUES('manifests',1,'74a4b7c72d85a8a3bc811328f3b385924fc335d80b418915e43bd86770d282fe',1704067200000000);
INSERT INTO "code_versions" VALUES('seals',1,'984fc0e18e1f0062ab6548cce5022e719b282c8cadb0e8d7a9e693522b2d68ec',1704067200000000);
INSERT INTO "code_versions" VALUES('customs',1,'3a057e301771b881aa5f04369f1871874fb765e5c298546b8551d910502f1bb5',1704067200000000);
INSERT INTO "code_versions" VALUES('berths',1,'ed150bfde498f19769f0dd4b6510bb9f25f515e1e004cb47abfaa58623c73d52',1704067200000000);
INSERT INTO "code_versions" VALUES('tiers',1,'7b8b50194eba45787c4de2af6036be45fd671abf9a2150fce9edc363b39b2806',1704067200000000);
CREATE TABLE computations (
	name TEXT NOT NULL, 
	pipeline TEXT NOT NULL, 
	code_version INTEGER NOT NULL, 
	code_hash TEXT NOT NULL, 
	codec TEXT NOT NULL, 
	options TEXT NOT NULL, 
	recorded_us BIGINT NOT NULL, 
	retired_us BIGINT, 
	CONSTRAINT pk_computations PRIMARY KEY (name)
);
INSERT INTO "computations" VALUES('visits','harbour',1,'1c899b2429d5b9ad4ec82ed267f89da81d49bd82a095c35b3d25dfe41c7fd0d2','json','{"exactly_once": true, "intervals": null, "on_error": "dead_letter", "on_late": "process", "retries": 0}',1704067200000000,NULL);
INSERT INTO "computations" VALUES('tally','harbour',1,'c9ff075346ad7a6926b1d36342fe2e71556e9f44853e8435bed7c2b569c22fbe','json','{"exactly_once": true, "intervals": null, "on_error": "dead_letter", "on_late": "process", "retries": 2}',1704067200000000,NULL);
INSERT INTO "computations" VALUES('manifests','harbour',1,'74a4b7c72d85a8a3bc811328f3b385924fc335d80b418915e43bd86770d282fe','msgpack','{"exactly_once": true, "intervals": null, "on_error": "dead_letter", "on_late": "process", "retries": 2}',1704067200000000,NULL);
INSERT INTO "computations" VALUES('seals','harbour',1,'984fc0e18e1f0062ab6548cce5022e719b282c8cadb0e8d7a9e693522b2d68ec','bytes','{"exactly_once": true, "intervals": null, "on_error": "dead_letter", "on_late": "process", "retries": 2}',1704067200000000,NULL);
INSERT INTO "computations" VALUES('customs','harbour',1,'3a057e301771b881aa5f04369f1871874fb765e5c298546b8551d910502f1bb5','json','{"exactly_once": true, "intervals": null, "on_error": "dead_letter", "on_late": "process", "retries": 2}',1704067200000000,NULL);
INSERT INTO "computations" VALUES('berths','harbour',1,'ed150bfde498f19769f0dd4b6510bb9f25f515e1e004cb47abfaa58623c73d52','json','{"exactly_once": true, "intervals": null, "on_error": "dead_letter", "on_late": "process", "retries": 2}',1704067200000000,NULL);
INSERT INTO "computations" VALUES('tiers','harbour',1,'7b8b50194eba45787c4de2af6036be45fd671abf9a2150fce9edc363b39b2806','json','{"exactly_once": true, "intervals": null, "on_error": "dead_letter", "on_late": "process", "retries": 2}',1704067200000000,NULL);
CREATE TABLE horizons (
	holder TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	version BIGINT NOT NULL, 
	published_us BIGINT NOT NULL, 
	expires_us BIGINT, 
	CONSTRAINT pk_horizons PRIMARY KEY (holder)
);
INSERT INTO "horizons" VALUES('gc','collector',21,1704081900000000,NULL);
CREATE TABLE input_positions (
	app_id TEXT NOT NULL, 
	pipeline TEXT NOT NULL, 
	input TEXT NOT NULL, 
	source_id TEXT NOT NULL, 
	position BIGINT NOT NULL, 
	version BIGINT NOT NULL, 
	CONSTRAINT pk_input_positions PRIMARY KEY (app_id)
);
CREATE TABLE intervals (
	app_id TEXT NOT NULL, 
	computation TEXT NOT NULL, 
	low TEXT NOT NULL, 
	high TEXT, 
	sequencer BIGINT NOT NULL, 
	commit_number BIGINT NOT NULL, 
	opened_version BIGINT, 
	closed_version BIGINT, 
	version BIGINT NOT NULL, 
	input_watermark_us BIGINT, 
	output_watermark_us BIGINT, 
	CONSTRAINT pk_intervals PRIMARY KEY (app_id)
);
INSERT INTO "intervals" VALUES('millpond/interval/tally//','tally','',NULL,1,1,25,NULL,26,1704067320000000,NULL);
INSERT INTO "intervals" VALUES('millpond/interval/dead_letters/harbour%2F/=harbour0','dead_letters','harbour/','harbour0',4,6,23,NULL,29,NULL,NULL);
INSERT INTO "intervals" VALUES('millpond/interval/berths//','berths','',NULL,4,3,23,NULL,28,1704067920000000,NULL);
INSERT INTO "intervals" VALUES('millpond/interval/customs//','customs','',NULL,4,2,23,NULL,28,1704067920000000,NULL);
INSERT INTO "intervals" VALUES('millpond/interval/manifests//','manifests','',NULL,4,2,23,NULL,28,1704067920000000,NULL);
INSERT INTO "intervals" VALUES('millpond/interval/seals//','seals','',NULL,4,2,23,NULL,28,1704067920000000,NULL);
INSERT INTO "intervals" VALUES('millpond/interval/tiers//','tiers','',NULL,4,3,23,NULL,28,1704067920000000,NULL);
INSERT INTO "intervals" VALUES('millpond/interval/visits//','visits','',NULL,4,4,23,NULL,29,1704068040000000,NULL);
CREATE TABLE leases (
	app_id TEXT NOT NULL, 
	sequencer BIGINT NOT NULL, 
	opened_version BIGINT, 
	closed_version BIGINT, 
	CONSTRAINT pk_leases PRIMARY KEY (app_id, sequencer)
);
INSERT INTO "leases" VALUES('millpond/interval/dead_letters/harbour%2F/=harbour0',1,1,23);
INSERT INTO "leases" VALUES('millpond/interval/visits//',1,2,23);
INSERT INTO "leases" VALUES('millpond/interval/manifests//',1,3,23);
INSERT INTO "leases" VALUES('millpond/interval/seals//',1,4,23);
INSERT INTO "leases" VALUES('millpond/interval/customs//',1,5,23);
INSERT INTO "leases" VALUES('millpond/interval/berths//',1,6,23);
INSERT INTO "leases" VALUES('millpond/interval/tiers//',1,7,23);
INSERT INTO "leases" VALUES('millpond/interval/dead_letters/harbour%2F/=harbour0',4,23,NULL);
INSERT INTO "leases" VALUES('millpond/interval/berths//',4,23,NULL);
INSERT INTO "leases" VALUES('millpond/interval/customs//',4,23,NULL);
INSERT INTO "leases" VALUES('millpond/interval/manifests//',4,23,NULL);
INSERT INTO "leases" VALUES('millpond/interval/seals//',4,23,NULL);
INSERT INTO "leases" VALUES('millpond/interval/tiers//',4,23,NULL);
INSERT INTO "leases" VALUES('millpond/interval/visits//',4,23,NULL);
INSERT INTO "leases" VALUES('millpond/interval/tally//',1,25,NULL);
CREATE TABLE millpond_catalog_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT millpond_catalog_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "millpond_catalog_version" VALUES('0001');
CREATE TABLE savepoints (
	name TEXT NOT NULL, 
	version BIGINT NOT NULL, 
	note TEXT NOT NULL, 
	created_us BIGINT NOT NULL, 
	released_us BIGINT, 
	CONSTRAINT pk_savepoints PRIMARY KEY (name)
);
CREATE TABLE store (
	id INTEGER NOT NULL, 
	store_id TEXT, 
	created_us BIGINT NOT NULL, 
	CONSTRAINT pk_store PRIMARY KEY (id)
);
INSERT INTO "store" VALUES(1,'bb745f5bda3468d81d8a301929116788',1704067200000000);
CREATE TABLE streams (
	pipeline TEXT NOT NULL, 
	name TEXT NOT NULL, 
	producers TEXT NOT NULL, 
	CONSTRAINT pk_streams PRIMARY KEY (pipeline, name)
);
INSERT INTO "streams" VALUES('harbour','arrivals','["injector"]');
INSERT INTO "streams" VALUES('harbour','berths','["berths"]');
INSERT INTO "streams" VALUES('harbour','customs','["customs"]');
INSERT INTO "streams" VALUES('harbour','departures','["visits"]');
INSERT INTO "streams" VALUES('harbour','manifests','["manifests"]');
INSERT INTO "streams" VALUES('harbour','seals','["seals"]');
INSERT INTO "streams" VALUES('harbour','tally','["tally"]');
INSERT INTO "streams" VALUES('harbour','tiers','["tiers"]');
CREATE TABLE subscriptions (
	pipeline TEXT NOT NULL, 
	consumer TEXT NOT NULL, 
	stream TEXT NOT NULL, 
	key_extractor TEXT NOT NULL, 
	CONSTRAINT pk_subscriptions PRIMARY KEY (pipeline, consumer, stream)
);
INSERT INTO "subscriptions" VALUES('harbour','visits','arrivals','the record''s own key');
INSERT INTO "subscriptions" VALUES('harbour','tally','departures','port');
INSERT INTO "subscriptions" VALUES('harbour','manifests','arrivals','the record''s own key');
INSERT INTO "subscriptions" VALUES('harbour','seals','arrivals','the record''s own key');
INSERT INTO "subscriptions" VALUES('harbour','customs','arrivals','the record''s own key');
INSERT INTO "subscriptions" VALUES('harbour','berths','arrivals','the record''s own key');
INSERT INTO "subscriptions" VALUES('harbour','tiers','arrivals','the record''s own key');
CREATE TABLE supersteps (
	pipeline TEXT NOT NULL, 
	superstep BIGINT NOT NULL, 
	version BIGINT NOT NULL, 
	records BIGINT NOT NULL, 
	late BIGINT NOT NULL, 
	duplicates BIGINT NOT NULL, 
	dead_letters BIGINT NOT NULL, 
	commit_ms FLOAT, 
	wall_us BIGINT NOT NULL, 
	CONSTRAINT pk_supersteps PRIMARY KEY (pipeline, superstep)
);
INSERT INTO "supersteps" VALUES('harbour',1,8,12,0,0,0,0.0,1704067200000000);
INSERT INTO "supersteps" VALUES('harbour',2,9,12,0,0,0,0.0,1704067260000000);
INSERT INTO "supersteps" VALUES('harbour',3,10,6,0,6,0,0.0,1704067320000000);
INSERT INTO "supersteps" VALUES('harbour',4,11,6,0,0,7,0.0,1704067380000000);
INSERT INTO "supersteps" VALUES('harbour',5,13,6,0,0,0,0.0,1704067440000000);
INSERT INTO "supersteps" VALUES('harbour',6,14,0,0,0,0,0.0,1704067500000000);
INSERT INTO "supersteps" VALUES('harbour',7,24,0,0,0,0,0.0,1704081900000000);
INSERT INTO "supersteps" VALUES('harbour',8,26,1,0,0,0,0.0,1704081900000000);
INSERT INTO "supersteps" VALUES('harbour',9,27,12,0,0,0,0.0,1704081900000000);
INSERT INTO "supersteps" VALUES('harbour',10,28,6,6,0,0,0.0,1704081960000000);
INSERT INTO "supersteps" VALUES('harbour',11,29,0,0,0,0,0.0,1704082020000000);
CREATE TABLE watermarks (
	pipeline TEXT NOT NULL, 
	superstep BIGINT NOT NULL, 
	subject TEXT NOT NULL, 
	version BIGINT NOT NULL, 
	input_us BIGINT, 
	output_us BIGINT, 
	CONSTRAINT pk_watermarks PRIMARY KEY (pipeline, superstep, subject)
);
INSERT INTO "watermarks" VALUES('harbour',1,'millpond/interval/berths//',8,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',1,'millpond/interval/customs//',8,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',1,'millpond/interval/manifests//',8,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',1,'millpond/interval/seals//',8,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',1,'millpond/interval/tiers//',8,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',1,'millpond/interval/visits//',8,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',2,'millpond/interval/berths//',9,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',2,'millpond/interval/customs//',9,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',2,'millpond/interval/manifests//',9,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',2,'millpond/interval/seals//',9,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',2,'millpond/interval/tiers//',9,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',2,'millpond/interval/visits//',9,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',3,'millpond/interval/berths//',10,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',3,'millpond/interval/customs//',10,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',3,'millpond/interval/manifests//',10,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',3,'millpond/interval/seals//',10,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',3,'millpond/interval/tiers//',10,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',3,'millpond/interval/visits//',10,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',4,'millpond/interval/berths//',11,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',4,'millpond/interval/customs//',11,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',4,'millpond/interval/manifests//',11,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',4,'millpond/interval/seals//',11,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',4,'millpond/interval/tiers//',11,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',4,'millpond/interval/visits//',11,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',5,'millpond/interval/berths//',13,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',5,'millpond/interval/customs//',13,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',5,'millpond/interval/manifests//',13,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',5,'millpond/interval/seals//',13,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',5,'millpond/interval/tiers//',13,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',5,'millpond/interval/visits//',13,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',6,'millpond/interval/tiers//',14,-9223372036854775808,NULL);
INSERT INTO "watermarks" VALUES('harbour',6,'millpond/watermark/harbour/computation/visits@50.0',14,1704067800000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',6,'millpond/watermark/harbour/computation/tally@50.0',14,1704067440000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',6,'millpond/watermark/harbour/computation/manifests@50.0',14,1704067800000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',6,'millpond/watermark/harbour/computation/seals@50.0',14,1704067800000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',6,'millpond/watermark/harbour/computation/customs@50.0',14,1704067800000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',6,'millpond/watermark/harbour/computation/berths@50.0',14,1704067800000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',6,'millpond/watermark/harbour/computation/tiers@50.0',14,1704067800000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',6,'millpond/watermark/harbour/injector/arrivals@50.0',14,NULL,1704067800000000);
INSERT INTO "watermarks" VALUES('harbour',7,'millpond/interval/berths//',24,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',7,'millpond/interval/tiers//',24,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',7,'millpond/interval/visits//',24,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',7,'millpond/watermark/harbour/computation/visits',24,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',7,'millpond/watermark/harbour/computation/tally',24,1704067320000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',7,'millpond/watermark/harbour/computation/manifests',24,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',7,'millpond/watermark/harbour/computation/seals',24,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',7,'millpond/watermark/harbour/computation/customs',24,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',7,'millpond/watermark/harbour/computation/berths',24,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',7,'millpond/watermark/harbour/computation/tiers',24,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',7,'millpond/watermark/harbour/computation/visits@50.0',24,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',7,'millpond/watermark/harbour/computation/manifests@50.0',24,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',7,'millpond/watermark/harbour/computation/seals@50.0',24,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',7,'millpond/watermark/harbour/computation/customs@50.0',24,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',7,'millpond/watermark/harbour/computation/berths@50.0',24,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',7,'millpond/watermark/harbour/computation/tiers@50.0',24,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',7,'millpond/watermark/harbour/injector/arrivals',24,NULL,1704067920000000);
INSERT INTO "watermarks" VALUES('harbour',7,'millpond/watermark/harbour/injector/arrivals@50.0',24,NULL,1704067920000000);
INSERT INTO "watermarks" VALUES('harbour',8,'millpond/interval/tally//',26,1704067320000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',9,'millpond/interval/berths//',27,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',9,'millpond/interval/customs//',27,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',9,'millpond/interval/manifests//',27,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',9,'millpond/interval/seals//',27,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',9,'millpond/interval/tiers//',27,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',9,'millpond/interval/visits//',27,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',10,'millpond/interval/berths//',28,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',10,'millpond/interval/customs//',28,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',10,'millpond/interval/manifests//',28,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',10,'millpond/interval/seals//',28,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',10,'millpond/interval/tiers//',28,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',10,'millpond/interval/visits//',28,1704067920000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',10,'millpond/watermark/harbour/computation/tally',28,1704067560000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',10,'millpond/watermark/harbour/computation/visits@50.0',28,1704068400000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',10,'millpond/watermark/harbour/computation/tally@50.0',28,1704067980000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',10,'millpond/watermark/harbour/computation/manifests@50.0',28,1704068400000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',10,'millpond/watermark/harbour/computation/seals@50.0',28,1704068400000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',10,'millpond/watermark/harbour/computation/customs@50.0',28,1704068400000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',10,'millpond/watermark/harbour/computation/berths@50.0',28,1704068400000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',10,'millpond/watermark/harbour/computation/tiers@50.0',28,1704068400000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',10,'millpond/watermark/harbour/injector/arrivals@50.0',28,NULL,1704068400000000);
INSERT INTO "watermarks" VALUES('harbour',11,'millpond/interval/visits//',29,1704068040000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',11,'millpond/watermark/harbour/computation/visits',29,1704068040000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',11,'millpond/watermark/harbour/computation/manifests',29,1704068040000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',11,'millpond/watermark/harbour/computation/seals',29,1704068040000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',11,'millpond/watermark/harbour/computation/customs',29,1704068040000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',11,'millpond/watermark/harbour/computation/berths',29,1704068040000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',11,'millpond/watermark/harbour/computation/tiers',29,1704068040000000,NULL);
INSERT INTO "watermarks" VALUES('harbour',11,'millpond/watermark/harbour/injector/arrivals',29,NULL,1704068040000000);
CREATE INDEX ix_intervals_computation ON intervals (computation);
CREATE INDEX ix_watermarks_version ON watermarks (version);
CREATE INDEX ix_supersteps_version ON supersteps (version);
COMMIT;
