// formats_probe.cpp - reads and writes quantized weights on request, for tests that compare them with those
// of other programs.
//
//     formats_probe COMMAND ... < INPUT > OUTPUT
//
// quantize FORMAT fp32|bf16        elements to the bytes of a matrix in memory
// dequantize FORMAT ELEMENTS       those bytes to fp32
// matvec FORMAT ROWS COLUMNS       the bytes, then fp32 factors (COLUMNS), to fp32 (ROWS)
// nf4 FOLDER NAME                  a matrix in a folder to its bytes
// copy FOLDER NAME FILE            that matrix to a safetensors file
// config FILE                      the config.json of a GGUF
// tensor FILE NAME ROWS [COLUMNS]  a tensor of a GGUF by its Hugging Face name, to fp32
// tokens FILE                      text to int32 tokens by a GGUF's tokenizer
// text FILE                        int32 tokens to text by that tokenizer
// tokenizer FILE FOLDER            writes the tokenizer's files into a folder
// ends FILE                        the tokens that begin and end a text
// render DATE                      lines of JSON, each with a chat template and its variables, to lines with
// what the
//                                  template writes of them on this date
// kept TEMPERATURE TOP_K TOP_P MIN_P PENALTY   the probability (fp64) of each token to be drawn; the input is
//                                  the number of tokens in the text, these (int32), and logits (fp32)
// time FORMAT ROWS COLUMNS         gigabytes a second of memcpy, dequantizing to fp32 and bf16, a matvec
// A mistake of the user's is reported in one line, with exit code 2, as by the trainer.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "llmc/arena.h"  // defines arena_give_back()
#include "llmc/data_chat_template.h"
#include "llmc/gguf_model.h"
#include "llmc/jinja.h"
#include "llmc/quant_formats.h"
#include "llmc/quant_nf4_files.h"
#include "llmc/sample_token.h"
#include "llmc/tokenizer.h"

namespace {
const Stream kStream{};
using Arguments = std::vector<std::string>;

// A buffer that is aligned for a matrix.
class Bytes {
  public:
    explicit Bytes(size_t size) : vectors_((size + 63) / 64), size_(size) {}
    unsigned char* data() { return reinterpret_cast<unsigned char*>(vectors_.data()); }
    size_t size() const { return size_; }

  private:
    struct alignas(64) Vector {
        unsigned char bytes[64] = {};
    };
    std::vector<Vector> vectors_;
    size_t size_;
};

Bytes read_input() {
    std::string text;
    char buffer[1 << 16];
    for (size_t n; (n = fread(buffer, 1, sizeof buffer, stdin)) > 0;) text.append(buffer, n);
    Bytes bytes(text.size());
    std::copy(text.begin(), text.end(), bytes.data());
    return bytes;
}
void write_output(const void* data, size_t bytes) { fwrite(data, 1, bytes, stdout); }
template <class T>
void write_output(const std::vector<T>& values) {
    write_output(values.data(), values.size() * sizeof values[0]);
}

const WeightFormat& format_of(const std::string& name) {
    for (const WeightFormat* format : kWeightFormats)
        if (name == format->name) return *format;
    fail("%s: no format", name.c_str());
}
int64_t number(const std::string& text) { return std::strtoll(text.c_str(), nullptr, 10); }

template <class T>
void quantize(const WeightFormat& format) {
    Bytes input = read_input();
    const auto n = static_cast<int64_t>(input.size() / sizeof(T));
    Bytes out(static_cast<size_t>(quantized_bytes(format, n)));
    const T* const w = reinterpret_cast<const T*>(input.data());
    if (&format == &kQ8_0) {
        quantize_q8_0(out.data(), w, n);
    } else {
        Nf4Quantizer quantizer(out.data(), n, format);
        quantizer.add(0, w, n);
        quantizer.finish();
    }
    write_output(out.data(), out.size());
}

QuantizedView view_of(const WeightFormat& format, Bytes& bytes, int64_t rows, int64_t columns,
                      size_t more = 0) {
    const QuantizedView view{&format, bytes.data(), rows, columns};
    if (static_cast<size_t>(quantized_bytes(view)) + more != bytes.size())
        fail("%zu bytes where %ld are needed", bytes.size(), quantized_bytes(view));
    return view;
}

void matvec(const Arguments& a) {
    Bytes input = read_input();
    const int64_t rows = number(a[1]), columns = number(a[2]);
    const size_t more = static_cast<size_t>(columns) * sizeof(float);
    const QuantizedView view = view_of(format_of(a[0]), input, rows, columns, more);
    std::vector<float> out(static_cast<size_t>(rows));
    const auto* x = reinterpret_cast<const float*>(input.data() + quantized_bytes(view));
    multiply_few_rows({out.data(), rows, x, 1}, view, nullptr, kStream);
    write_output(out);
}

void nf4(const Arguments& a, bool copies) {
    const SafetensorsFolder folder(a[0]);
    if (!Nf4File::has(folder, a[1])) fail("%s: tensor \"%s\" is not NF4", a[0].c_str(), a[1].c_str());
    const Nf4File file(folder, a[1]);
    Bytes bytes(
        static_cast<size_t>(quantized_bytes(file.format(), file.state().rows * file.state().columns)));
    file.read(bytes.data());
    if (!copies) return write_output(bytes.data(), bytes.size());
    FileTensors tensors;
    tensors.add(a[1], file.state(), reinterpret_cast<const char*>(bytes.data()));
    tensors.write(a[2], kStream);
}

void gguf_tensor(const Arguments& a) {
    const GgufModel model(a[0]);
    std::vector<int64_t> shape = {number(a[2])};
    if (a.size() > 3) shape.push_back(number(a[3]));
    const GgufPart part = model.get(a[1], shape);
    const int64_t columns = a.size() > 3 ? shape[1] : 1;
    std::vector<float> out(static_cast<size_t>(shape[0] * columns));
    if (part.has_floats()) {
        part.read_floats(0, shape[0], out.data());
        return write_output(out);
    }
    const WeightFormat* format = find_ggml_format(part.tensor->type->number);
    Bytes bytes(static_cast<size_t>(quantized_bytes(*format, shape[0] * columns)));
    part.read_rows(0, shape[0], bytes.data());
    dequantize(out.data(), QuantizedView{format, bytes.data(), shape[0], columns}, kStream);
    write_output(out);
}

void kept(const Arguments& a) {
    Bytes input = read_input();
    const auto* const numbers = reinterpret_cast<const int*>(input.data());
    const std::vector<int> text(numbers + 1, numbers + 1 + numbers[0]);
    const auto* const first = reinterpret_cast<const float*>(numbers + 1 + numbers[0]);
    const auto* const end = reinterpret_cast<const float*>(input.data() + input.size());
    std::vector<float> logits(first, end);
    const auto value = [&](size_t i) { return std::strtod(a[i].c_str(), nullptr); };
    penalize_repetition(logits, text, value(4));
    const Sampling sampling = {.temperature = value(0),
                               .top_k = static_cast<int>(number(a[1])),
                               .top_p = value(2),
                               .min_p = value(3)};
    std::vector<double> probabilities(logits.size());
    double total = 0;
    for (const Candidate& c : candidates(logits, sampling))
        total += probabilities[static_cast<size_t>(c.token)] = c.weight;
    for (double& p : probabilities) p /= total;
    write_output(probabilities);
}

void tokens(const std::string& path, const std::string& command) {
    const GgufFile file(path);
    const Tokenizer tokenizer = read_gguf_tokenizer(file.metadata(), path);
    if (command == "ends") {
        printf("%d %d\n", tokenizer.begin_of_text(), tokenizer.end_of_text());
        return;
    }
    Bytes input = read_input();
    const std::string text(reinterpret_cast<const char*>(input.data()), input.size());
    if (command == "tokens") return write_output(tokenizer.encode(text, Ends::Add));
    std::vector<int> ids(text.size() / sizeof(int));
    text.copy(reinterpret_cast<char*>(ids.data()), ids.size() * sizeof(int));
    const std::string decoded = tokenizer.decode(ids);
    write_output(decoded.data(), decoded.size());
}

// Renders the template of a line; an error is part of the answer.
std::string rendered(const std::string& line, const std::tm& date) {
    const auto given = nlohmann::ordered_json::parse(line);
    nlohmann::json answer;
    try {
        const jinja::Template used(given["template"].get<std::string>());
        jinja::Variables variables;
        for (const auto& [name, value] : given["variables"].items())
            variables.emplace_back(name, jinja::Value::from_json(value));
        const jinja::Rendered whole = used.render(variables, line.size(), date);
        answer["text"] = whole.text;
        answer["spans"] = nlohmann::json::array();
        for (const jinja::Span& span : whole.generated) answer["spans"].push_back({span.begin, span.end});
    } catch (const UserError& error) {
        answer["error"] = error.what();
    }
    return answer.dump() + "\n";
}

void render(const std::tm& date) {
    std::string line;
    for (int c; (c = getchar()) != EOF;) {
        line += static_cast<char>(c);
        if (c != '\n') continue;
        const std::string answer = rendered(line, date);
        fwrite(answer.data(), 1, answer.size(), stdout);
        line.clear();
    }
}

// Seconds of the fastest of several runs.
template <class F>
double fastest(F&& f) {
    double least = 1e9;
    for (int i = 0; i < 9; i++) {
        const auto start = std::chrono::steady_clock::now();
        f();
        least =
            std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return least;
}

void time(const Arguments& a) {
    const WeightFormat& format = format_of(a[0]);
    const int64_t rows = number(a[1]), columns = number(a[2]), n = rows * columns;
    Bytes bytes(static_cast<size_t>(quantized_bytes(format, n)));
    Bytes fp32(static_cast<size_t>(n) * 4), from(static_cast<size_t>(n) * 4);
    const QuantizedView view{&format, bytes.data(), rows, columns};
    auto* const out = reinterpret_cast<float*>(fp32.data());
    const double read = static_cast<double>(bytes.size()), count = static_cast<double>(n);
    const double copy = fastest([&] {
#pragma omp parallel for
        for (int64_t row = 0; row < rows; row++)
            std::memcpy(fp32.data() + row * columns * 4, from.data() + row * columns * 4,
                        static_cast<size_t>(columns) * 4);
    });
    const double to_fp32 = fastest([&] { dequantize(out, view, kStream); });
    const std::vector<float> x(static_cast<size_t>(columns), 1.f);
    const double product = fastest([&] {
        multiply_few_rows({out, rows, x.data(), 1}, view, nullptr, kStream);
    });
    printf(R"({"format": "%s", "memcpy": %.2f, "fp32": %.2f, "matvec": %.2f})"
           "\n",
           format.name, 8 * count / copy / 1e9, (read + 4 * count) / to_fp32 / 1e9, read / product / 1e9);
}

void run(const std::string& command, const Arguments& a) {
    if (command == "quantize")
        return a[1] == "bf16" ? quantize<bf16>(format_of(a[0])) : quantize<float>(format_of(a[0]));
    if (command == "dequantize") {
        Bytes bytes = read_input();
        std::vector<float> out(static_cast<size_t>(number(a[1])));
        dequantize(out.data(), view_of(format_of(a[0]), bytes, 1, number(a[1])), kStream);
        return write_output(out);
    }
    if (command == "matvec") return matvec(a);
    if (command == "nf4" || command == "copy") return nf4(a, command == "copy");
    if (command == "config") {
        const std::string json = config_json(GgufModel(a[0]).config(), "float32").dump();
        return write_output(json.data(), json.size());
    }
    if (command == "chat") {
        const std::string text = GgufModel(a[0]).chat_template();
        return write_output(text.data(), text.size());
    }
    if (command == "tokenizer") return write_gguf_tokenizer(GgufFile(a[0]).metadata(), a[0], 128, a[1]);
    if (command == "tensor") return gguf_tensor(a);
    if (command == "tokens" || command == "text" || command == "ends") return tokens(a[0], command);
    if (command == "kept") return kept(a);
    if (command == "time") return time(a);
    if (command == "render") return render(chat_date(a[0]));
    fail("%s: no command", command.c_str());
}
}  // namespace

int main(int argc, char** argv) {
    if (argc < 3) return 1;
    try {
        run(argv[1], Arguments(argv + 2, argv + argc));
    } catch (const UserError& error) {
        fprintf(stderr, "%s\n", error.what());
        return 2;
    }
    return 0;
}
