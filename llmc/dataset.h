// dataset.h - reads tokens from files and decides the order in which training sees them. The order is a pure
// function of seed and sequence number, so a resumed run needs only the number of its next sequence.
//
// There are three kinds of files. Token shards have llm.c's formats, with 16 or 32 bits per token; each shard
// is a token stream of its own. JSON lines and lists contain examples (data_files.h tells them from text),
// which a tokenizer turns into tokens (data_tokens.h) and which are packed into sequences (data_packing.h).
// Every other file is text; its tokens are its bytes, or what a tokenizer makes of it (data_tokens.h).
// Examples and texts may be compressed (data_files.h). All text files together are one stream, and so are all
// examples. Tokens are read when a sequence needs them, so there may be any number of files of any size. They
// are then dropped from the page cache, because memory plans do not count its memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "llmc/data_packing.h"
#include "llmc/error.h"
#include "llmc/file.h"

// Expands an option's patterns (file names or glob(3) patterns) to files, sorted by bytes within each
// pattern. Fails, naming option and pattern, if a pattern matches nothing, a directory, an empty file or
// something that is not a regular file.
std::vector<std::string> expand_files(const std::vector<std::string>& patterns, const char* option);

// Data could not be read in the middle of a run. The training up to here is good and can be saved.
struct DataError : RecoverableError {
    using RecoverableError::RecoverableError;
};

// Marks a token of an example as having no loss (sets its sign bit), and gets the token back.
inline int32_t without_loss(int32_t token) {
    return static_cast<int32_t>(static_cast<uint32_t>(token) | 1u << 31);
}
inline int32_t token_of(int32_t kept) { return kept & 0x7fffffff; }

// The token streams of one option's files. Only the places of the files' tokens are kept in memory; the
// file that was read last stays open.
class Dataset {
  public:
    // `files` as from expand_files. Fails on a damaged shard, and if the files are of several kinds.
    Dataset(const std::vector<std::string>& files, const char* option) : option_(option) {
        for (const std::string& path : files) add(path);
    }

    // is_text: the files are not shards. is_examples: they are JSON examples, which count as text too.
    bool is_text() const { return !format_; }
    bool is_examples() const { return lines_; }
    // The number of examples once they are tokenized, and each example in order.
    uint64_t example_count() const {
        uint64_t sum = 0;
        for (const File& file : files_) sum += file.examples;
        return sum;
    }
    void for_each_example(const std::function<void(const Example&)>& use) const;
    // How many texts were longer than a sequence and continue in further examples, and how many other
    // examples were cut because they were longer.
    uint64_t texts_parted() const { return parted_; }
    uint64_t examples_cut() const { return cut_; }
    // For a line about examples that were cut: which --seq-len would cut none, if that is known, or that the
    // model, which can learn from sequences of `most`, has too few positions for that.
    std::string longer_length(int seq_len, int most) const;
    // True if each token is a byte of the text.
    bool is_bytes() const { return is_text() && !text_tokens_; }
    const std::string& option() const { return option_; }
    // Estimates the memory that the list of files takes. A file's name is counted here and in the options.
    size_t held_bytes() const {
        size_t sum = 0;
        for (const File& file : files_) sum += sizeof file + 3 * (file.path.size() + sizeof file.path);
        return sum;
    }
    // Estimates the peak of the temporary memory that reading needed for long lines and for packing. Buffers
    // of fixed size are not counted.
    size_t reading_bytes() const { return std::max(reading_bytes_, packed_ ? packed_->packing_bytes() : 0); }
    void reading_took(size_t bytes) { reading_bytes_ = std::max(reading_bytes_, bytes); }

    // The bytes of the files: of compressed texts those that they contain, of compressed examples those on
    // the disk.
    uint64_t file_bytes() const {
        uint64_t sum = 0;
        for (const File& file : files_) sum += file.is_unpacked ? file.count : file.stamp.bytes;
        return sum;
    }
    bool has_compressed_examples() const { return has_compressed_examples_; }

    size_t stream_count() const { return is_text() ? 1 : files_.size(); }
    uint64_t token_count(size_t stream) const { return is_text() ? tokens_ : files_[stream].count; }
    uint64_t token_count() const { return tokens_; }
    // True if `path` is one of the data's files.
    bool reads(const std::string& path) const;
    // A stream's name in messages: its file, or the first of its files.
    std::string stream_name(size_t stream) const;
    // The data's files, each once.
    std::vector<std::string> paths() const;

    using PutTokens = std::function<void(std::span<const int32_t> tokens)>;
    // Replaces a text's bytes by other tokens, all below `limit`. encode(file, put) calls put(tokens) with
    // the tokens of one file, in pieces. The tokens go to a temporary file, 2 or 4 bytes each as in shards.
    // Fails if a file changes meanwhile, or if the temporary file cannot be written.
    void tokenize(uint32_t limit,
                  const std::function<void(const FileReader& file, const PutTokens& put)>& encode);

    // Reads the tokens of an example; those without a loss are marked by without_loss().
    void read(const Example& example, std::vector<int32_t>& tokens) const;

    using PutExample =
        std::function<void(std::span<const int32_t> tokens, bool is_text, bool last, size_t length)>;
    // Turns JSON examples into tokens. encode(file, put) calls put() with the tokens of one example; a text
    // may come in several parts, the last of which has `last` set. `length` is how many tokens the example
    // has, or 0 if that is not known. An example of more than seq_len + 1 tokens is cut, but a text continues
    // in further examples, each of which begins with the last token of the one before. Fails as tokenize()
    // does, and if there is no example or no token has a loss.
    void tokenize_examples(int seq_len, int most_len,
                           const std::function<void(const FileReader& file, const PutExample& put)>& encode);

    // Gives each example a sequence of its own, instead of packing several into one.
    void keep_apart() { apart_ = true; }

    // The examples, packed into sequences.
    const PackedExamples& packed() const;

    // Holds out the last tenth of each text file, or of each file's examples, rounded down, and returns it as
    // a dataset for validation. Returns null and holds out nothing if all those tenths together have fewer
    // than `least` tokens, or no token with a loss.
    std::unique_ptr<Dataset> hold_out(uint64_t least);

    // Requires from here on that all tokens are below `vocab`, the size of the model's vocabulary. Checks the
    // first 512 Mi tokens now, which takes about a second, and the others when they are read. Fails naming
    // the file, the position and the token.
    void check_tokens(int vocab);
    // The largest token among the first 512 Mi.
    int32_t largest_token() const;

    // Copies tokens [first, first + count) of a stream. Fails with a DataError if a file has changed or
    // cannot be read, or if a token is outside the vocabulary.
    void read(size_t stream, uint64_t first, uint64_t count, int32_t* out) const;

    // Drops from the page cache what was read so far.
    void drop_pages() const;

  private:
    // A part of a stream: the tokens [begin, begin + count) of a file.
    struct File {
        std::string path;
        FileStamp stamp;        // when the file was first opened
        uint64_t begin, count;  // in tokens of the file without its header, or of text_tokens_
        uint64_t first = 0;     // position in the stream at which this part begins
        uint64_t first_example = 0, examples = 0;  // the file's part of index_->examples
        bool is_unpacked = false;  // a compressed text: `count` bytes of texts_, from texts_begin on
        uint64_t texts_begin = 0;
    };

    struct TextTokens;
    struct ExampleIndex;

    explicit Dataset(const std::string& option) : option_(option) {}
    size_t token_bytes() const;
    void read_first_tokens(const std::function<void(std::span<const int32_t>)>& use) const;
    // The last tenth of a file: how many tokens and examples it has.
    struct Tenth {
        uint64_t tokens, examples;
    };
    // Adds the number of its tokens that have a loss to `learnt`.
    Tenth last_tenth(const File& file, uint64_t& learnt) const;

    void append(File file);
    void add(const std::string& path);
    // Opens the file if it is not open. Fails if it has changed since the run began.
    const FileReader& open_unchanged(const File& file) const;
    // Reads tokens [first, first + count) of a File. If that fails because it changed, fails as
    // open_unchanged().
    void read_file(const File& file, uint64_t first, uint64_t count, int32_t* out) const;
    void check(const File& file, uint64_t first, uint64_t count, const int32_t* tokens) const;

    std::string option_;
    const struct ShardFormat* format_ = nullptr;  // null: text
    bool lines_ = false;                          // JSON lines
    bool has_compressed_examples_ = false;
    std::shared_ptr<ExampleIndex> index_;  // of the examples, once they are tokenized
    mutable std::shared_ptr<const PackedExamples> packed_;
    size_t reading_bytes_ = 0;
    size_t longest_ = 0;
    bool knows_longest_ = true;
    uint64_t parted_ = 0, cut_ = 0;  // texts continued, and examples cut, because they were too long
    bool apart_ = false;             // one example per sequence
    std::shared_ptr<const TextTokens> text_tokens_;  // null: tokens are the text's bytes
    std::vector<File> files_;  // all of one stream for text; each shard is its own stream
    uint64_t tokens_ = 0;
    uint32_t limit_ = 256;
    mutable std::unique_ptr<const FileReader> open_;  // the file read last
    std::shared_ptr<TemporaryFile> texts_;            // what compressed texts contain, one after another
    uint64_t texts_bytes_ = 0;
};

// Deals a dataset out as sequences of T inputs and their T targets, which are the inputs' successors.
// Sequences are numbered through all epochs. dev/reference.py computes the same order:
//
//   A stream of n >= T + 1 tokens has max(1, (n - T) / T) windows with shuffling, and (n - 1) / T without it.
//   The windows of all streams are the S sequences of an epoch. Sequence q is number q % S of epoch e = q /
//   S: the epoch goes through the streams in an order of its own, and through each stream's windows in an
//   order of their own. Window w starts at token offset + w * T. With shuffling, K(g) = random_key(seed, e,
//   g): the i-th of F streams is f = Permutation(F, K(0))(i), the j-th of its W windows is Permutation(W, K(f
//   + 1))(j), and offset is random_bits_of(K(f + 1), 2^63) % T, or 0 if n < 2 T. Without shuffling, streams
//   and windows are in their given order and offset is 0.
//
//   Examples are packed in the order of the data, the same way in each epoch. An example of n tokens takes n
//   - 1 rows; the unused rest of a sequence is padding without a loss. With shuffling, the j-th of an epoch's
//   S sequences is Permutation(S, K(1))(j).
class SequenceLoader {
  public:
    // The dataset must outlive the loader and stay where it is. Fails if a stream is shorter than T + 1
    // tokens. Examples must already be tokenized for this T.
    SequenceLoader(const Dataset& data, int seq_len, uint64_t seed, bool shuffle);

    uint64_t sequences_per_epoch() const { return sequences_per_epoch_; }
    // How many targets of these sequences have a loss.
    uint64_t tokens_with_loss(uint64_t first_sequence, uint64_t count) const;
    // padding: the share of an epoch's positions that hold no example. attended: the length of a token's
    // example, averaged over all positions; the cost of attention is proportional to it.
    double padding() const { return data_.is_examples() ? data_.packed().padding() : 0; }
    double attended() const {
        return data_.is_examples() ? data_.packed().attended() : static_cast<double>(seq_len_);
    }

    // Writes the sequences first_sequence ... first_sequence + rows - 1 to inputs (rows, T) and targets
    // (rows, T). The result depends only on the arguments. Fails as Dataset::read does.
    void fill(uint64_t first_sequence, int rows, int32_t* inputs, int32_t* targets);

    // Fills a whole batch, whose first `count` sequences are real; the targets of the others are -1 and have
    // no loss. Writes positions and ends (rows.h) if the batch has them. Each padding token is a
    // document of its own, which costs attention least.
    void fill_batch(uint64_t first_sequence, uint64_t count, std::span<int32_t> inputs,
                    std::span<int32_t> targets, std::span<int32_t> positions = {},
                    std::span<int32_t> ends = {});

  private:
    // The packed sequence that comes at `place`, counted through all epochs.
    uint64_t packed_sequence(uint64_t place) const;
    // Writes a packed sequence to the rows that begin at `at`.
    void fill_packed(uint64_t place, size_t at, std::span<int32_t> inputs, std::span<int32_t> targets,
                     std::span<int32_t> positions, std::span<int32_t> ends) const;
    // How many sequences an epoch reads of a stream. Those of training begin anywhere in its first seq_len
    // tokens, those of a validation at the first.
    uint64_t windows(size_t stream) const;
    // The stream that the epoch reads as its number `turn`.
    uint64_t stream_at(uint64_t turn) const;
    // The token at which the stream's window number `place` in this epoch starts.
    uint64_t window_start(uint64_t stream, uint64_t place) const;
    void enter_epoch(uint64_t epoch);

    const Dataset& data_;
    const uint64_t seq_len_, seed_;
    const bool shuffle_;
    uint64_t sequences_per_epoch_ = 0;
    uint64_t epoch_ = ~uint64_t{0};  // of the last sequence that was read
    std::vector<uint64_t> ends_;     // the sequence number at which each stream ends in it, by turns
};
