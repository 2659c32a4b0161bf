-- Nexmark's questions in plain SQL, over the tables person, auction and bid: the oracle of this folder's answers.
-- A query begins with its name; answers.json.gz has its rows. Times are timestamps here and become text in the answers.

-- q0
SELECT auction, bidder, price, date_time FROM bid;

-- q1
SELECT auction, bidder, (price * 0.908)::DECIMAL(20, 3)::VARCHAR AS price_eur, date_time FROM bid;

-- q2
SELECT auction, price FROM bid WHERE auction IN (1007, 1020, 2001, 2019, 2087);

-- q3
SELECT p.name, p.city, p.state, a.id AS auction_id
FROM auction a JOIN person p ON a.seller = p.id
WHERE a.category = 10 AND p.state IN ('or', 'id', 'ca');

-- q4
WITH closed AS (
    SELECT a.id, a.category, max(b.price) AS final
    FROM auction a JOIN bid b ON b.auction = a.id AND b.date_time BETWEEN a.date_time AND a.expires
    GROUP BY a.id, a.category
)
SELECT category, avg(final) AS avg_final FROM closed GROUP BY category;

-- q5
WITH hops AS (
    SELECT time_bucket(INTERVAL 2 SECOND, b.date_time) - to_seconds(2 * back.i) AS start, b.auction
    FROM bid b CROSS JOIN range(5) back(i)
),
counts AS (SELECT start, auction, count(*) AS num FROM hops GROUP BY start, auction)
SELECT auction, num FROM counts QUALIFY num = max(num) OVER (PARTITION BY start);

-- q5_with_windows
WITH hops AS (
    SELECT time_bucket(INTERVAL 2 SECOND, b.date_time) - to_seconds(2 * back.i) AS start, b.auction
    FROM bid b CROSS JOIN range(5) back(i)
),
counts AS (SELECT start, auction, count(*) AS num FROM hops GROUP BY start, auction)
SELECT start AS window_start, start + INTERVAL 10 SECOND AS window_end, auction, num
FROM counts QUALIFY num = max(num) OVER (PARTITION BY start);

-- q6
WITH won AS (
    SELECT a.seller, b.auction, b.price, b.date_time
    FROM auction a JOIN bid b ON b.auction = a.id AND b.date_time BETWEEN a.date_time AND a.expires
    QUALIFY row_number() OVER (PARTITION BY a.id ORDER BY b.price DESC, b.date_time) = 1
)
SELECT seller, avg(price) OVER (
    PARTITION BY seller ORDER BY date_time, auction ROWS BETWEEN 10 PRECEDING AND CURRENT ROW
) AS avg
FROM won;

-- q6_group_top1
WITH won AS (
    SELECT a.seller, b.auction, b.price, b.date_time
    FROM auction a JOIN bid b ON b.auction = a.id AND b.date_time BETWEEN a.date_time AND a.expires
    QUALIFY row_number() OVER (PARTITION BY a.id ORDER BY b.price, b.date_time) = 1
)
SELECT seller, avg(price) OVER (
    PARTITION BY seller ORDER BY date_time, auction ROWS BETWEEN 10 PRECEDING AND CURRENT ROW
) AS avg
FROM won;

-- q7
SELECT auction, price, bidder, date_time FROM bid
QUALIFY price = max(price) OVER (PARTITION BY time_bucket(INTERVAL 10 SECOND, date_time));

-- q8
SELECT DISTINCT p.id AS person_id, p.name, time_bucket(INTERVAL 10 SECOND, p.date_time) AS window_start
FROM person p JOIN auction a ON a.seller = p.id
    AND time_bucket(INTERVAL 10 SECOND, a.date_time) = time_bucket(INTERVAL 10 SECOND, p.date_time);

-- q9
SELECT a.id, a.item_name, a.description, a.initial_bid, a.reserve, a.date_time AS auction_date_time, a.expires,
    a.seller, a.category, b.auction, b.bidder, b.price, b.date_time AS bid_date_time
FROM auction a JOIN bid b ON b.auction = a.id AND b.date_time BETWEEN a.date_time AND a.expires
QUALIFY row_number() OVER (PARTITION BY a.id ORDER BY b.price DESC, b.date_time) = 1;

-- q10
SELECT auction, bidder, price, date_time, strftime(date_time, '%Y-%m-%d') AS date, strftime(date_time, '%H:%M') AS time
FROM bid;

-- q11
WITH marked AS (
    SELECT bidder, date_time,
        coalesce(date_time - lag(date_time) OVER previous >= INTERVAL 10 SECOND, true) AS begins
    FROM bid WINDOW previous AS (PARTITION BY bidder ORDER BY date_time)
),
numbered AS (
    SELECT bidder, date_time, sum(begins::INTEGER) OVER (PARTITION BY bidder ORDER BY date_time) AS session FROM marked
)
SELECT bidder, count(*) AS bid_count, min(date_time) AS starttime, max(date_time) + INTERVAL 10 SECOND AS endtime
FROM numbered GROUP BY bidder, session;

-- q12_event_time
SELECT time_bucket(INTERVAL 10 SECOND, date_time) AS window_start, bidder, count(*) AS bid_count,
    sum(price)::BIGINT AS price_sum
FROM bid GROUP BY window_start, bidder;

-- q13
SELECT b.auction, b.bidder, b.price, b.date_time, side.i::VARCHAR AS value
FROM bid b JOIN range(10000) side(i) ON b.auction % 10000 = side.i;

-- q14
SELECT auction, bidder, (price * 0.908)::DECIMAL(20, 3)::VARCHAR AS price_eur,
    CASE
        WHEN hour(date_time) BETWEEN 8 AND 18 THEN 'dayTime'
        WHEN hour(date_time) <= 6 OR hour(date_time) >= 20 THEN 'nightTime'
        ELSE 'otherTime'
    END AS bid_time_type,
    date_time, length(extra) - length(replace(extra, 'c', '')) AS c_counts
FROM bid WHERE price * 0.908 > 1000000 AND price * 0.908 < 50000000;

-- q15
SELECT strftime(date_time, '%Y-%m-%d') AS day,
    count(*) AS total_bids,
    count(*) FILTER (price < 10000) AS rank1_bids,
    count(*) FILTER (price >= 10000 AND price < 1000000) AS rank2_bids,
    count(*) FILTER (price >= 1000000) AS rank3_bids,
    count(DISTINCT bidder) AS total_bidders,
    count(DISTINCT bidder) FILTER (price < 10000) AS rank1_bidders,
    count(DISTINCT bidder) FILTER (price >= 10000 AND price < 1000000) AS rank2_bidders,
    count(DISTINCT bidder) FILTER (price >= 1000000) AS rank3_bidders,
    count(DISTINCT auction) AS total_auctions,
    count(DISTINCT auction) FILTER (price < 10000) AS rank1_auctions,
    count(DISTINCT auction) FILTER (price >= 10000 AND price < 1000000) AS rank2_auctions,
    count(DISTINCT auction) FILTER (price >= 1000000) AS rank3_auctions
FROM bid GROUP BY day;

-- q16
SELECT channel, strftime(date_time, '%Y-%m-%d') AS day, max(strftime(date_time, '%H:%M')) AS minute,
    count(*) AS total_bids,
    count(*) FILTER (price < 10000) AS rank1_bids,
    count(*) FILTER (price >= 10000 AND price < 1000000) AS rank2_bids,
    count(*) FILTER (price >= 1000000) AS rank3_bids,
    count(DISTINCT bidder) AS total_bidders,
    count(DISTINCT bidder) FILTER (price < 10000) AS rank1_bidders,
    count(DISTINCT bidder) FILTER (price >= 10000 AND price < 1000000) AS rank2_bidders,
    count(DISTINCT bidder) FILTER (price >= 1000000) AS rank3_bidders,
    count(DISTINCT auction) AS total_auctions,
    count(DISTINCT auction) FILTER (price < 10000) AS rank1_auctions,
    count(DISTINCT auction) FILTER (price >= 10000 AND price < 1000000) AS rank2_auctions,
    count(DISTINCT auction) FILTER (price >= 1000000) AS rank3_auctions
FROM bid GROUP BY channel, day;

-- q17
SELECT auction, strftime(date_time, '%Y-%m-%d') AS day,
    count(*) AS total_bids,
    count(*) FILTER (price < 10000) AS rank1_bids,
    count(*) FILTER (price >= 10000 AND price < 1000000) AS rank2_bids,
    count(*) FILTER (price >= 1000000) AS rank3_bids,
    min(price) AS min_price, max(price) AS max_price, avg(price) AS avg_price, sum(price)::BIGINT AS sum_price
FROM bid GROUP BY auction, day;

-- q18
SELECT auction, bidder, price, channel, url, date_time, extra FROM bid
QUALIFY row_number() OVER (PARTITION BY bidder, auction ORDER BY date_time DESC, extra) = 1;

-- q19
SELECT auction, bidder, price, channel, url, date_time, extra,
    row_number() OVER (PARTITION BY auction ORDER BY price DESC, date_time) AS rank_number
FROM bid QUALIFY rank_number <= 10;

-- q20
SELECT b.auction, b.bidder, b.price, b.channel, b.url, b.date_time AS bid_date_time, b.extra AS bid_extra,
    a.item_name, a.description, a.initial_bid, a.reserve, a.date_time AS auction_date_time, a.expires, a.seller,
    a.category, a.extra AS auction_extra
FROM bid b JOIN auction a ON b.auction = a.id WHERE a.category = 10;

-- q21
SELECT auction, bidder, price, channel,
    CASE lower(channel)
        WHEN 'apple' THEN '0' WHEN 'google' THEN '1' WHEN 'facebook' THEN '2' WHEN 'baidu' THEN '3'
        ELSE nullif(regexp_extract(url, '(&|[?])channel_id=([^&]*)', 2), '')
    END AS channel_id
FROM bid WHERE channel_id IS NOT NULL;

-- q22
SELECT auction, bidder, price, channel,
    split_part(url, '/', 4) AS dir1, split_part(url, '/', 5) AS dir2, split_part(url, '/', 6) AS dir3
FROM bid;

-- q101
SELECT a.id AS auction_id, a.item_name, max(b.price) AS current_highest_bid
FROM auction a LEFT JOIN bid b ON b.auction = a.id GROUP BY a.id, a.item_name;

-- q102
SELECT a.id AS auction_id, a.item_name, count(*) AS bid_count
FROM auction a JOIN bid b ON b.auction = a.id GROUP BY a.id, a.item_name
HAVING bid_count >= (SELECT count(*) // count(DISTINCT auction) FROM bid);

-- q103
SELECT id AS auction_id, item_name FROM auction
WHERE id IN (SELECT auction FROM bid GROUP BY auction HAVING count(*) >= 20);

-- q104
SELECT id AS auction_id, item_name FROM auction
WHERE id NOT IN (SELECT auction FROM bid GROUP BY auction HAVING count(*) < 20);

-- q105
SELECT a.id AS auction_id, a.item_name, count(*) AS bid_count
FROM auction a JOIN bid b ON b.auction = a.id GROUP BY a.id, a.item_name
ORDER BY bid_count DESC, auction_id LIMIT 1000;

-- q106
SELECT min(final) AS min_final FROM (
    SELECT max(b.price) AS final
    FROM auction a JOIN bid b ON b.auction = a.id AND b.date_time BETWEEN a.date_time AND a.expires
    GROUP BY a.id
);
