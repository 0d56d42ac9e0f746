-- The archive's catalogue: every question except the bytes themselves is answered here.
-- SQLite, WAL mode. Names are BLOBs, because a file name is bytes; times are nanoseconds since
-- 1970-01-01 UTC; sizes and offsets are bytes. Described for strangers in docs/formats/catalogue.md.

PRAGMA user_version = 1;

-- Counters and the archive's identity.
CREATE TABLE meta (
    key   TEXT PRIMARY KEY,   -- archive_id, seq; clean, journalled, last_array (see rebuild)
    value NOT NULL            -- text or integer
) WITHOUT ROWID;
INSERT INTO meta VALUES ('seq', 0);

-- One row per file system object. Numbers are never used twice (AUTOINCREMENT): they are what
-- stat reports, over remounts and rebuilds.
CREATE TABLE inodes (
    ino      INTEGER PRIMARY KEY AUTOINCREMENT,
    mode     INTEGER NOT NULL,            -- type and permission bits, as in stat
    uid      INTEGER NOT NULL,
    gid      INTEGER NOT NULL,
    rdev     INTEGER NOT NULL DEFAULT 0,  -- device number of a device node
    nlink    INTEGER NOT NULL,            -- names of a file; 2 + subdirectories of a directory
    size     INTEGER NOT NULL DEFAULT 0,  -- as of the last close or truncate; open files: ask the file
    atime_ns INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,
    ctime_ns INTEGER NOT NULL,
    target   BLOB,                        -- a symbolic link's text, else NULL
    version  INTEGER,                     -- current content, versions.version; NULL: no content
    seq      INTEGER NOT NULL,            -- meta.seq when this row (or its names, xattrs) changed
    dirty    INTEGER NOT NULL DEFAULT 1,  -- 1: this state is in no image's slice yet
    recorded INTEGER NOT NULL DEFAULT 0   -- 1: some earlier state is, so a deletion must reach disc
);
CREATE INDEX inodes_dirty ON inodes (ino) WHERE dirty = 1;

-- The tree. A file with several names has several rows.
CREATE TABLE names (
    cookie INTEGER PRIMARY KEY AUTOINCREMENT,  -- position in a directory listing, never reused
    parent INTEGER NOT NULL,  -- inodes.ino of the directory
    name   BLOB NOT NULL,     -- 1 to 255 bytes, without / and NUL
    ino    INTEGER NOT NULL,  -- what it names
    UNIQUE (parent, name)
);
CREATE INDEX names_listing ON names (parent, cookie);
CREATE INDEX names_ino ON names (ino);

-- Extended attributes, POSIX ACLs among them.
CREATE TABLE xattrs (
    ino   INTEGER NOT NULL,
    name  BLOB NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (ino, name)
) WITHOUT ROWID;

-- The contents a file has had. A closed version never changes again once it is being sealed.
CREATE TABLE versions (
    version  INTEGER PRIMARY KEY AUTOINCREMENT,
    ino      INTEGER NOT NULL,            -- the file; the row may outlive it (see tombstones)
    number   INTEGER NOT NULL,            -- 1, 2, 3 ... within the file
    size     INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,            -- of the content, when it was closed
    created_ns INTEGER NOT NULL,          -- when the version began
    sha256   TEXT,                        -- hex; NULL until the version is about to be sealed
    state    TEXT NOT NULL                -- bucket: may still be written; sealing: frozen, in a
        CHECK (state IN ('bucket', 'sealing', 'sealed', 'burned')),
                                          -- planned image; sealed: in finished images; burned:
                                          -- on verified discs whose arrays have their parity
    resident INTEGER NOT NULL,            -- 1: the whole content is a file in the buffer; 2: so it
                                          -- is, recalled and not yet durable; 0: it is not
    open     INTEGER NOT NULL DEFAULT 0,  -- 1: a mount has it open, it may not be sealed now
    writes   INTEGER NOT NULL DEFAULT 0,  -- counts opens for writing: a hash taken at another
                                          -- count is stale
    used_ns  INTEGER NOT NULL DEFAULT 0,  -- last use, for eviction
    UNIQUE (ino, number)
);
CREATE INDEX versions_state ON versions (state, version);
CREATE INDEX versions_resident ON versions (used_ns) WHERE resident > 0;

-- Where the bytes of a version are. A version larger than an image has several rows.
CREATE TABLE extents (
    version      INTEGER NOT NULL,
    piece        INTEGER NOT NULL,  -- 0, 1, 2 ... in file order
    file_offset  INTEGER NOT NULL,  -- first byte of the piece within the version
    length       INTEGER NOT NULL,
    image        INTEGER NOT NULL,  -- images.image
    sha256       TEXT,              -- of the piece, hex; NULL until sealed
    path         TEXT,              -- the piece's path within the image; NULL until sealed
    image_offset INTEGER,           -- first byte within the image; NULL until sealed
    PRIMARY KEY (version, piece)
) WITHOUT ROWID;
CREATE INDEX extents_image ON extents (image);

-- What a planned image will hold, until it is made; a crash in between finds it here.
CREATE TABLE plans (
    image   INTEGER NOT NULL,   -- images.image
    ordinal INTEGER NOT NULL,   -- order on the disc
    kind    TEXT NOT NULL CHECK (kind IN ('entry', 'record')),
    body    TEXT NOT NULL,      -- JSON
    PRIMARY KEY (image, ordinal)
) WITHOUT ROWID;

-- Deleted files and directories whose existence some image records: they must not come back.
CREATE TABLE tombstones (
    ino        INTEGER PRIMARY KEY,
    path       BLOB NOT NULL,             -- the last name it had, for people
    deleted_ns INTEGER NOT NULL,
    seq        INTEGER NOT NULL,          -- as inodes.seq
    dirty      INTEGER NOT NULL DEFAULT 1
);

-- Disc arrays: the unit of redundancy. data images at positions 0..k-1, parity at k..k+m-1.
CREATE TABLE arrays (
    number INTEGER PRIMARY KEY,   -- 1, 2, 3 ...
    array_id TEXT NOT NULL UNIQUE, -- 32 hex digits, written on its discs
    k      INTEGER NOT NULL,      -- data positions planned
    m      INTEGER NOT NULL,      -- parity images
    state  TEXT NOT NULL          -- filling: takes images; closed: no more data images;
        CHECK (state IN ('filling', 'closed', 'protected', 'burned'))
                                  -- protected: parity images exist; burned: every disc verified
);

-- Disc images, in the buffer or on a disc.
CREATE TABLE images (
    image    INTEGER PRIMARY KEY AUTOINCREMENT,
    label    TEXT NOT NULL UNIQUE,  -- volume label of image and disc
    image_id TEXT NOT NULL UNIQUE,  -- 32 hex digits, written on the disc
    kind     TEXT NOT NULL CHECK (kind IN ('data', 'parity')),
    array    INTEGER NOT NULL,      -- arrays.number
    position INTEGER NOT NULL,      -- 0.. within the array
    size     INTEGER,               -- NULL until made
    sha256   TEXT,                  -- of the whole image, hex; NULL until made
    state    TEXT NOT NULL CHECK (state IN ('planned', 'sealed', 'burned')),
    buffered INTEGER NOT NULL,      -- 1: a copy is in the buffer
    created_ns INTEGER NOT NULL,
    UNIQUE (array, position)
);

-- Discs that were written. An image may have several over time: repair burns it anew.
CREATE TABLE discs (
    slot        INTEGER PRIMARY KEY,  -- where the library keeps it
    image       INTEGER NOT NULL,     -- images.image
    state       TEXT NOT NULL         -- good: verified; suspect: a read failed; lost: given up
        CHECK (state IN ('good', 'suspect', 'lost')),
    burned_ns   INTEGER NOT NULL,
    verified_ns INTEGER NOT NULL      -- last full verification
);
CREATE INDEX discs_image ON discs (image);

-- Recalls asked for and not yet dropped: prepare, query, cancel, evict.
CREATE TABLE recalls (
    request    INTEGER NOT NULL,  -- one prepare = one number
    version    INTEGER NOT NULL,
    state      TEXT NOT NULL CHECK (state IN ('queued', 'done', 'failed')),
    note       TEXT NOT NULL DEFAULT '',  -- why it failed
    PRIMARY KEY (request, version)
) WITHOUT ROWID;
CREATE INDEX recalls_version ON recalls (version);

-- What happened, in the terms of PREMIS 3.0 (eventType, dateTime, outcome, linked object).
CREATE TABLE events (
    event   INTEGER PRIMARY KEY AUTOINCREMENT,
    time_ns INTEGER NOT NULL,
    type    TEXT NOT NULL,     -- ingestion, message digest calculation, replication,
                               -- fixity check, deletion, recovery, ...
    object  TEXT NOT NULL,     -- image label, path or version it is about
    outcome TEXT NOT NULL CHECK (outcome IN ('success', 'failure', 'warning')),
    detail  TEXT NOT NULL DEFAULT ''
);
