// jinja_parser.h - reads a chat template: divides it into tokens and makes a tree of statements and
// expressions. White space around tags is treated as transformers sets Jinja up: trim_blocks (a tag takes the
// line end after it) and lstrip_blocks (a tag that is alone before its line takes the spaces before it).
#pragma once

#include <cstdlib>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/error.h"
#include "llmc/jinja_builtins.h"
#include "llmc/jinja_strings.h"
#include "llmc/jinja_values.h"
#include "llmc/utf8.h"

namespace jinja {

// An error whose message names the template's line already.
struct LineError : UserError {
    using UserError::UserError;
};
[[noreturn]] inline void fail_at(int line, const std::string& what) {
    throw LineError(format("the chat template (line %d): ", line) + what);
}

// ---- tokens

enum class TokenKind {
    Data,
    BeginPrint,
    EndPrint,
    BeginTag,
    EndTag,
    Name,
    String,
    Integer,
    Float,
    Operator,
    End
};

struct Token {
    TokenKind kind;
    int line;
    std::string text;  // of a string: its value
};

class Lexer {
  public:
    explicit Lexer(std::string_view source) : source_(normalized(source)) {}

    std::vector<Token> tokens() {
        while (at_ < source_.size()) read_data();
        add(TokenKind::End, "");
        return std::move(tokens_);
    }

  private:
    // Line ends become \n, and the last one goes.
    static std::string normalized(std::string_view source) {
        std::string out = with_replaced(with_replaced(source, "\r\n", "\n"), "\r", "\n");
        if (out.ends_with('\n')) out.pop_back();
        return out;
    }

    void add(TokenKind kind, std::string text) { tokens_.push_back({kind, line_, std::move(text)}); }
    std::string_view rest() const { return std::string_view(source_).substr(at_); }
    void skip(size_t bytes) {
        line_ += static_cast<int>(std::ranges::count(rest().substr(0, bytes), '\n'));
        at_ += bytes;
    }
    void skip_space() { skip(rest().size() - strip(rest(), {}, true, false).size()); }
    // Takes this text if it comes next.
    bool take(std::string_view text) {
        if (!rest().starts_with(text)) return false;
        skip(text.size());
        return true;
    }

    // Reads text up to a tag, and the tag.
    void read_data() {
        size_t begin = at_;
        while (begin < source_.size() &&
               !(source_[begin] == '{' && begin + 1 < source_.size() &&
                 std::string_view("{%#").find(source_[begin + 1]) != std::string_view::npos))
            begin++;
        if (begin == source_.size()) {
            add(TokenKind::Data, std::string(rest()));
            skip(rest().size());
            return;
        }
        const char kind = source_[begin + 1];
        put_data(begin, kind != '{');
        skip(2);
        if (!take("-")) take("+");
        if (kind == '#') return read_comment();
        if (kind == '%' && is_raw()) return read_raw();
        add(kind == '{' ? TokenKind::BeginPrint : TokenKind::BeginTag, "");
        read_code(kind == '{');
    }

    // Adds the text up to a tag at `end`. A sign behind the tag's beginning, or that it is a statement or a
    // comment, says which white space goes.
    void put_data(size_t end, bool strips_line) {
        std::string_view text = std::string_view(source_).substr(at_, end - at_);
        const char sign = end + 2 < source_.size() ? source_[end + 2] : '\0';
        if (sign == '-') {
            text = strip(text, {}, false, true);
        } else if (sign != '+' && strips_line) {
            const size_t line_end = text.rfind('\n');
            const size_t begin = line_end == text.npos ? 0 : line_end + 1;
            const bool begins_line = begin > 0 || at_ == 0 || source_[at_ - 1] == '\n';
            if (begins_line && strip(text.substr(begin)).empty()) text = text.substr(0, begin);
        }
        if (!text.empty()) add(TokenKind::Data, std::string(text));
        skip(end - at_);
    }

    void read_comment() {
        const size_t end = rest().find("#}");
        if (end == std::string_view::npos) fail_at(line_, "a comment does not end");
        const char sign = end > 0 ? rest()[end - 1] : '\0';
        skip(end + 2);
        take_after_tag(sign);
    }

    // The length of a tag `NAME %}` that comes next, without what white space control takes after it; 0 if
    // another comes.
    size_t tag_length(std::string_view text, std::string_view name) const {
        const size_t all = text.size();
        text = strip(text, {}, true, false);
        if (!text.starts_with(name)) return 0;
        text = strip(text.substr(name.size()), {}, true, false);
        if (text.starts_with('-') || text.starts_with('+')) text.remove_prefix(1);
        return text.starts_with("%}") ? all - text.size() + 2 : 0;
    }
    bool is_raw() const { return tag_length(rest(), "raw") > 0; }

    // Skips what is removed behind a tag: all white space after "-%}", one line end after "%}", and nothing
    // after "+%}". `last` is the character before "%}".
    void take_after_tag(char last) {
        last == '-' ? skip_space() : static_cast<void>(last != '+' && take("\n"));
    }

    void read_raw() {
        const int line = line_;
        skip(tag_length(rest(), "raw"));
        if (source_[at_ - 3] == '-') skip_space();
        for (size_t end = at_; (end = source_.find("{%", end)) != source_.npos; end += 2) {
            const std::string_view behind = std::string_view(source_).substr(end + 2);
            const size_t sign = behind.starts_with('-') || behind.starts_with('+') ? 1 : 0;
            const size_t length = tag_length(behind.substr(sign), "endraw");
            if (length == 0) continue;
            put_data(end, true);
            skip(2 + sign + length);
            return take_after_tag(source_[at_ - 3]);
        }
        fail_at(line, "{% raw %} does not end");
    }

    // Reads the tokens of a tag and its end.
    void read_code(bool prints) {
        std::string open;  // brackets that are open
        for (;;) {
            skip_space();
            if (at_ == source_.size()) fail_at(line_, "the template ends inside of a tag");
            if (open.empty() && take_end(prints)) return;
            const char c = source_[at_];
            if (c == '"' || c == '\'')
                read_string(c);
            else if (c >= '0' && c <= '9')
                read_number();
            else if (is_name(c))
                read_name();
            else
                read_operator(open);
        }
    }
    bool take_end(bool prints) {
        const std::string_view end = prints ? "}}" : "%}";
        const char sign = rest()[0];
        const bool signs = (sign == '-' || (sign == '+' && !prints)) && rest().substr(1).starts_with(end);
        if (!signs && !rest().starts_with(end)) return false;
        add(prints ? TokenKind::EndPrint : TokenKind::EndTag, "");
        skip(signs ? 3 : 2);
        if (signs || !prints) take_after_tag(signs ? sign : ' ');
        return true;
    }

    static bool is_name(char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
               static_cast<unsigned char>(c) >= 0x80;
    }
    void read_name() {
        size_t end = 0;
        while (end < rest().size() && is_name(rest()[end])) end++;
        add(TokenKind::Name, std::string(rest().substr(0, end)));
        skip(end);
    }

    void read_number() {
        const auto digits = [&](size_t from) {
            return std::min(rest().find_first_not_of("0123456789", from), rest().size());
        };
        const size_t whole = digits(0);
        size_t end = whole;
        if (rest().substr(end).starts_with('.') && digits(end + 1) > end + 1) end = digits(end + 1);
        if (const std::string_view after = rest().substr(end);
            after.starts_with('e') || after.starts_with('E')) {
            const size_t sign = after.substr(1).starts_with('-') || after.substr(1).starts_with('+') ? 1 : 0;
            if (digits(end + 1 + sign) > end + 1 + sign) end = digits(end + 1 + sign);
        }
        if (end < rest().size() && is_name(rest()[end]))
            fail_at(line_, "numbers are only supported in decimal, without letters or underscores");
        add(end > whole ? TokenKind::Float : TokenKind::Integer, std::string(rest().substr(0, end)));
        skip(end);
    }

    void read_operator(std::string& open) {
        static constexpr std::string_view kOperators[] = {"//", "**", "==", "!=", ">=", "<=", "+", "-", "/",
                                                          "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                                          ">",  "<",  "=",  ".",  ":",  "|",  ",", ";"};
        for (const std::string_view op : kOperators) {
            if (!rest().starts_with(op)) continue;
            if (op == "(" || op == "[" || op == "{") open += op == "(" ? ')' : op == "[" ? ']' : '}';
            if (op == ")" || op == "]" || op == "}") {
                if (open.empty() || open.back() != op[0])
                    fail_at(line_, "unexpected '" + std::string(op) + "'");
                open.pop_back();
            }
            add(TokenKind::Operator, std::string(op));
            return skip(op.size());
        }
        fail_at(line_, "unexpected character '" + printable(rest().substr(0, 1)) + "'");
    }

    void read_string(char quote) {
        const int line = line_;
        size_t end = 1;
        while (end < rest().size() && rest()[end] != quote) end += rest()[end] == '\\' ? 2 : 1;
        if (end >= rest().size()) fail_at(line, "a string does not end");
        add(TokenKind::String, unescaped(rest().substr(1, end - 1)));
        skip(end + 1);
    }

    // The value of a string literal, with Python's escapes.
    std::string unescaped(std::string_view text) const {
        std::string out;
        for (size_t at = 0; at < text.size();) {
            if (text[at] != '\\') {
                out += text[at++];
                continue;
            }
            const char c = text[at + 1];
            constexpr std::string_view kEscapes = "\\'\"abfnrtv", kMeant = "\\'\"\a\b\f\n\r\t\v";
            at += 2;
            if (const size_t found = kEscapes.find(c); found != kEscapes.npos)
                out += kMeant[found];
            else if (c == 'x' || c == 'u' || c == 'U')
                append_number(out, text, at, c == 'x' ? 2 : c == 'u' ? 4 : 8, 16);
            else if (c >= '0' && c <= '7')
                append_number(out, text, --at, 3, 8);
            else if (c == 'N')
                fail_at(line_, "the escape \\N{...} in a string is not supported");
            else if (c != '\n')
                (out += '\\') += c;
        }
        return out;
    }
    void append_number(std::string& out, std::string_view text, size_t& at, size_t most, int base) const {
        const std::string digits(text.substr(at, most));
        char* end = nullptr;
        const auto code = static_cast<int32_t>(std::strtol(digits.c_str(), &end, base));
        const auto count = static_cast<size_t>(end - digits.c_str());
        if ((base == 16 && count != most) || count == 0 || !utf8proc_codepoint_valid(code))
            fail_at(line_, "a string has an escape that is no character");
        append_code(out, code);
        at += count;
    }

    const std::string source_;
    size_t at_ = 0;
    int line_ = 1;
    std::vector<Token> tokens_;
};

// ---- the tree

struct Expression;
using ExpressionPtr = std::unique_ptr<Expression>;
using Expressions = std::vector<ExpressionPtr>;

enum class ExpressionKind {
    Constant,
    Name,
    List,
    Tuple,
    Dict,       // parts: key, value, key, value...
    Attribute,  // parts[0].text
    Item,       // parts[0][parts[1]]
    Slice,      // parts[0][parts[1] : parts[2] : parts[3]]; a part may be null
    Call,       // parts[0](arguments)
    Filter,     // parts[0] | text(arguments)
    Test,       // parts[0] is text(arguments)
    Not,
    And,
    Or,
    Condition,   // parts[0] if parts[1] else parts[2], which may be null
    Compare,     // parts[0] operators[0] parts[1] operators[1] parts[2]...
    Join,        // parts joined by ~
    Arithmetic,  // parts[0] text parts[1]
    Negative,
    Positive
};

struct Argument {
    std::string name;  // empty if it has none; "*" and "**" stand for a list and a dict of arguments
    ExpressionPtr value;
};

struct Expression {
    ExpressionKind kind;
    int line;
    int depth = 0;  // how deeply expressions nest in this one
    std::string text;
    Value constant;
    Expressions parts;
    std::vector<Argument> arguments;
    std::vector<std::string> operators;
};

struct Statement;
using Statements = std::vector<std::unique_ptr<Statement>>;

enum class StatementKind {
    Print,
    If,          // branches
    For,         // target in expression if condition: body, else otherwise
    Set,         // target = expression
    SetBlock,    // target = body, with filters
    Macro,       // name, parameters
    Generation,  // what the assistant says
    Break,
    Continue
};

struct Statement {
    StatementKind kind;
    int line;
    std::string text;
    ExpressionPtr expression, condition;
    ExpressionPtr target;  // a name, an attribute of a namespace, or a tuple of such
    Statements body, otherwise;
    std::vector<std::pair<ExpressionPtr, Statements>> branches;  // an else has no condition
    std::vector<Argument> parameters;                            // with their defaults, or null
};

// ---- the parser

constexpr int kDeepestSource = 200;       // most brackets and statements inside one another
constexpr int kDeepestExpression = 1000;  // most expressions inside one another; each operator nests one

class Parser {
  public:
    explicit Parser(std::string_view source) : tokens_(Lexer(source).tokens()) {}

    Statements parse() { return parse_body({}); }
    bool has_generation() const { return has_generation_; }

  private:
    // ---- tokens
    const Token& now() const { return tokens_[at_]; }
    const Token& ahead() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
    Token next() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }
    bool is_operator(std::string_view op) const {
        return now().kind == TokenKind::Operator && now().text == op;
    }
    bool is_name(std::string_view name) const { return now().kind == TokenKind::Name && now().text == name; }
    bool take_operator(std::string_view op) { return is_operator(op) && (next(), true); }
    bool take_name(std::string_view name) { return is_name(name) && (next(), true); }
    [[noreturn]] void refuse() const {
        const Token& t = now();
        const bool ends = t.kind == TokenKind::EndPrint || t.kind == TokenKind::EndTag;
        fail_at(t.line, t.kind == TokenKind::End ? "the template ends too early"
                        : ends                   ? "a tag ends too early"
                                                 : "unexpected '" + printable(t.text.substr(0, 60)) + "'");
    }
    void expect_operator(std::string_view op) {
        if (!take_operator(op)) refuse();
    }
    std::string expect_name() {
        if (now().kind != TokenKind::Name) refuse();
        return next().text;
    }
    void expect(TokenKind kind) {
        if (now().kind != kind) refuse();
        next();
    }

    [[noreturn]] void refuse_depth() const {
        fail_at(now().line, format("nests more than %d deep", kDeepestSource));
    }
    // Counts how deeply the source nests.
    struct Deeper {
        explicit Deeper(Parser& p) : parser(p) {
            if (++p.depth_ > kDeepestSource) p.refuse_depth();
        }
        ~Deeper() { parser.depth_--; }
        Parser& parser;
    };

    ExpressionPtr make(ExpressionKind kind, int line, std::string text = "") const {
        auto e = std::make_unique<Expression>();
        e->kind = kind;
        e->line = line;
        e->text = std::move(text);
        return e;
    }
    template <class... Parts>
    ExpressionPtr make_of(ExpressionKind kind, int line, Parts... parts) const {
        ExpressionPtr e = make(kind, line);
        (add_part(*e, std::move(parts)), ...);
        return e;
    }
    // Adds a part, which may be null.
    static void add_part(Expression& e, ExpressionPtr part) {
        count_depth(e, part.get());
        e.parts.push_back(std::move(part));
    }
    // Long chains of operators nest too: 1 + 1 + 1 is (1 + 1) + 1.
    static void count_depth(Expression& e, const Expression* part) {
        if (part) e.depth = std::max(e.depth, part->depth + 1);
        if (e.depth > kDeepestExpression)
            fail_at(e.line, format("an expression nests more than %d deep: divide it with {%% set %%}",
                                   kDeepestExpression));
    }
    ExpressionPtr constant(int line, Value value) const {
        ExpressionPtr e = make(ExpressionKind::Constant, line);
        e->constant = std::move(value);
        return e;
    }
    std::unique_ptr<Statement> make_statement(StatementKind kind) const {
        auto s = std::make_unique<Statement>();
        s->kind = kind;
        s->line = now().line;
        return s;
    }

    // Calls read() for each of the items that commas separate, up to the closing bracket, and reads that.
    template <class Read>
    void parse_items(std::string_view close, Read&& read) {
        for (bool first = true; !is_operator(close); first = false) {
            if (!first) expect_operator(",");
            if (is_operator(close)) break;
            read();
        }
        next();
    }

    // ---- statements

    // Reads statements up to a tag with one of these names, which is left to be read.
    Statements parse_body(const std::set<std::string>& ends) {
        const Deeper deeper(*this);
        Statements body;
        for (;;) {
            if (now().kind == TokenKind::End) {
                if (!ends.empty()) fail_at(now().line, "{% " + *ends.begin() + " %} is missing");
                return body;
            }
            if (now().kind == TokenKind::Data) {
                auto text = make_statement(StatementKind::Print);
                text->expression = constant(now().line, Value::string(next().text));
                body.push_back(std::move(text));
            } else if (now().kind == TokenKind::BeginPrint) {
                auto print = make_statement(StatementKind::Print);
                next();
                print->expression = parse_tuple();
                expect(TokenKind::EndPrint);
                body.push_back(std::move(print));
            } else {
                expect(TokenKind::BeginTag);
                if (now().kind == TokenKind::Name && ends.contains(now().text)) return body;
                body.push_back(parse_statement());
                expect(TokenKind::EndTag);
            }
        }
    }
    // Reads the end of a tag, and then the statements up to the given tags.
    Statements parse_rest(const std::set<std::string>& ends) {
        take_operator(":");
        expect(TokenKind::EndTag);
        return parse_body(ends);
    }

    std::unique_ptr<Statement> parse_statement() {
        if (is_name("for")) return parse_for();
        if (is_name("if")) return parse_if();
        if (is_name("set")) return parse_set();
        if (is_name("macro")) return parse_macro();
        if (is_name("generation")) return parse_generation();
        if (is_name("break") || is_name("continue")) {
            auto s = make_statement(is_name("break") ? StatementKind::Break : StatementKind::Continue);
            if (loops_ == 0) fail_at(now().line, "{% " + now().text + " %} outside of a loop");
            next();
            return s;
        }
        if (now().kind != TokenKind::Name) refuse();
        static const std::set<std::string> others = {"autoescape", "block",  "call", "debug",  "do",
                                                     "extends",    "filter", "from", "import", "include",
                                                     "pluralize",  "trans",  "with"};
        fail_at(now().line, "the tag {% " + printable(now().text.substr(0, 60)) + " %} is " +
                                (others.contains(now().text) ? "not supported" : "unknown"));
    }

    std::unique_ptr<Statement> parse_for() {
        auto s = make_statement(StatementKind::For);
        next();
        s->target = parse_target(false);
        if (!take_name("in")) refuse();
        s->expression = parse_tuple(false);
        if (take_name("if")) s->condition = parse_expression();
        if (is_name("recursive")) fail_at(now().line, "recursive loops are not supported");
        loops_++;
        s->body = parse_rest({"endfor", "else"});
        loops_--;
        if (take_name("else")) s->otherwise = parse_rest({"endfor"});
        next();
        return s;
    }

    std::unique_ptr<Statement> parse_if() {
        auto s = make_statement(StatementKind::If);
        conditions_++;
        do {
            next();
            ExpressionPtr condition = parse_tuple(false);
            s->branches.emplace_back(std::move(condition), parse_rest({"elif", "else", "endif"}));
        } while (is_name("elif"));
        if (take_name("else")) s->branches.emplace_back(nullptr, parse_rest({"endif"}));
        conditions_--;
        next();
        return s;
    }

    std::unique_ptr<Statement> parse_set() {
        auto s = make_statement(StatementKind::Set);
        next();
        s->target = parse_target(true);
        if (take_operator("=")) {
            s->expression = parse_tuple();
            return s;
        }
        s->kind = StatementKind::SetBlock;
        s->expression = parse_filters(nullptr, is_operator("|"));
        s->body = parse_rest({"endset"});
        next();
        return s;
    }

    std::unique_ptr<Statement> parse_macro() {
        auto s = make_statement(StatementKind::Macro);
        next();
        s->text = expect_name();
        expect_operator("(");
        parse_items(")", [&] {
            Argument parameter{expect_name(), nullptr};
            if (take_operator("="))
                parameter.value = parse_expression();
            else if (!s->parameters.empty() && s->parameters.back().value)
                fail_at(now().line, "a parameter without a default follows one with a default");
            s->parameters.push_back(std::move(parameter));
        });
        s->body = parse_closed("endmacro");
        return s;
    }

    // Reads a body and its end. A loop around it cannot be left from inside: transformers makes a function of
    // {% generation %} too.
    Statements parse_closed(const char* end) {
        const int outer = std::exchange(loops_, 0);
        Statements body = parse_rest({end});
        loops_ = outer;
        next();
        return body;
    }

    std::unique_ptr<Statement> parse_generation() {
        auto s = make_statement(StatementKind::Generation);
        has_generation_ = true;
        next();
        s->body = parse_closed("endgeneration");
        return s;
    }

    ExpressionPtr parse_target(bool with_attributes) {
        const Deeper deeper(*this);
        ExpressionPtr all = make(ExpressionKind::Tuple, now().line);
        bool several = false;
        while (now().kind == TokenKind::Name || is_operator("(")) {
            if (is_name("in") && !all->parts.empty()) break;
            if (take_operator("(")) {
                add_part(*all, parse_target(false));
                expect_operator(")");
            } else {
                const int line = now().line;
                ExpressionPtr one = make(ExpressionKind::Name, line, expect_name());
                if (constants().contains(one->text)) fail_at(line, "can't assign to '" + one->text + "'");
                if (with_attributes && take_operator(".")) {
                    one = make_of(ExpressionKind::Attribute, line, std::move(one));
                    one->text = expect_name();
                }
                add_part(*all, std::move(one));
            }
            if (!take_operator(",")) break;
            several = true;
        }
        if (all->parts.empty()) refuse();
        return several ? std::move(all) : std::move(all->parts[0]);
    }

    // ---- expressions, from those that bind least to those that bind most

    // Expressions with commas between them make a tuple.
    ExpressionPtr parse_tuple(bool with_conditions = true) {
        const int line = now().line;
        const auto one = [&] { return with_conditions ? parse_expression() : parse_or(); };
        ExpressionPtr first = one();
        if (!is_operator(",")) return first;
        ExpressionPtr tuple = make_of(ExpressionKind::Tuple, line, std::move(first));
        while (take_operator(",")) {
            if (ends_tuple()) break;
            add_part(*tuple, one());
        }
        return tuple;
    }
    bool ends_tuple() const {
        return now().kind == TokenKind::EndPrint || now().kind == TokenKind::EndTag || is_operator(")");
    }

    ExpressionPtr parse_expression() {
        const Deeper deeper(*this);
        int line = now().line;
        ExpressionPtr value = parse_or();
        while (take_name("if")) {
            ExpressionPtr condition = parse_or();
            ExpressionPtr otherwise = take_name("else") ? parse_expression() : nullptr;
            value = make_of(ExpressionKind::Condition, line, std::move(value), std::move(condition),
                            std::move(otherwise));
            line = now().line;
        }
        return value;
    }
    // Reads operands with any of these operators between them.
    template <class Operand>
    ExpressionPtr parse_operators(std::initializer_list<std::string_view> operators, Operand&& operand) {
        ExpressionPtr left = operand();
        const auto is_one = [&](std::string_view op) { return is_operator(op) || is_name(op); };
        while (std::ranges::any_of(operators, is_one)) {
            const Token op = next();
            const ExpressionKind kind = op.text == "or"    ? ExpressionKind::Or
                                        : op.text == "and" ? ExpressionKind::And
                                                           : ExpressionKind::Arithmetic;
            left = make_of(kind, op.line, std::move(left), operand());
            left->text = op.text;
        }
        return left;
    }
    ExpressionPtr parse_or() {
        return parse_operators({"or"}, [&] { return parse_operators({"and"}, [&] { return parse_not(); }); });
    }
    ExpressionPtr parse_not() {
        const int line = now().line;
        if (!take_name("not")) return parse_compare();
        const Deeper deeper(*this);
        return make_of(ExpressionKind::Not, line, parse_not());
    }
    ExpressionPtr parse_compare() {
        const int line = now().line;
        ExpressionPtr first = parse_sum();
        ExpressionPtr compare = make(ExpressionKind::Compare, line);
        for (;;) {
            static const std::set<std::string> operators = {"==", "!=", "<", "<=", ">", ">="};
            if (now().kind == TokenKind::Operator && operators.contains(now().text)) {
                compare->operators.push_back(next().text);
            } else if (take_name("in")) {
                compare->operators.push_back("in");
            } else if (is_name("not") && ahead().kind == TokenKind::Name && ahead().text == "in") {
                next(), next();
                compare->operators.push_back("not in");
            } else {
                break;
            }
            if (compare->parts.empty()) add_part(*compare, std::move(first));
            add_part(*compare, parse_sum());
        }
        return compare->parts.empty() ? std::move(first) : std::move(compare);
    }
    ExpressionPtr parse_sum() {
        return parse_operators({"+", "-"}, [&] { return parse_join(); });
    }
    ExpressionPtr parse_join() {
        const int line = now().line;
        ExpressionPtr first = parse_product();
        if (!is_operator("~")) return first;
        ExpressionPtr join = make_of(ExpressionKind::Join, line, std::move(first));
        while (take_operator("~")) add_part(*join, parse_product());
        return join;
    }
    ExpressionPtr parse_product() {
        return parse_operators({"*", "/", "//", "%"}, [&] {
            ExpressionPtr value = parse_unary(true);
            if (is_operator("**")) fail_at(now().line, "the operator ** is not supported");
            return value;
        });
    }
    ExpressionPtr parse_unary(bool with_filters) {
        const Deeper deeper(*this);
        const int line = now().line;
        ExpressionPtr value;
        if (take_operator("-"))
            value = make_of(ExpressionKind::Negative, line, parse_unary(false));
        else if (take_operator("+"))
            value = make_of(ExpressionKind::Positive, line, parse_unary(false));
        else
            value = parse_primary();
        value = parse_postfix(std::move(value));
        return with_filters ? parse_filters(std::move(value), true) : std::move(value);
    }

    ExpressionPtr parse_primary() {
        const Token token = next();
        switch (token.kind) {
            case TokenKind::Name:
                if (const auto known = constants().find(token.text); known != constants().end())
                    return constant(token.line, known->second);
                return make(ExpressionKind::Name, token.line, token.text);
            case TokenKind::String: {
                std::string text = token.text;
                while (now().kind == TokenKind::String) text += next().text;
                return constant(token.line, Value::string(text));
            }
            case TokenKind::Integer:
            case TokenKind::Float:
                return constant(token.line, number_of(token));
            case TokenKind::Operator:
                if (token.text == "(") return parse_in_parentheses(token.line);
                if (token.text == "[") return parse_list(token.line);
                if (token.text == "{") return parse_dict(token.line);
                [[fallthrough]];
            default:
                at_ -= token.kind == TokenKind::End ? 0 : 1;
                refuse();
        }
    }
    static const std::map<std::string, Value>& constants() {
        static const Value yes = Value::boolean(true), no = Value::boolean(false), none = Value::none();
        static const std::map<std::string, Value> all = {{"true", yes}, {"false", no}, {"none", none},
                                                         {"True", yes}, {"False", no}, {"None", none}};
        return all;
    }
    static Value number_of(const Token& token) {
        if (token.kind == TokenKind::Float) return Value::real(std::strtod(token.text.c_str(), nullptr));
        errno = 0;
        const int64_t number = std::strtoll(token.text.c_str(), nullptr, 10);
        if (errno != 0) fail_at(token.line, "the number " + token.text.substr(0, 40) + " is too large");
        return Value::integer(number);
    }
    ExpressionPtr parse_in_parentheses(int line) {
        if (take_operator(")")) return make(ExpressionKind::Tuple, line);
        ExpressionPtr value = parse_tuple();
        expect_operator(")");
        return value;
    }
    ExpressionPtr parse_list(int line) {
        ExpressionPtr list = make(ExpressionKind::List, line);
        parse_items("]", [&] { add_part(*list, parse_expression()); });
        return list;
    }
    ExpressionPtr parse_dict(int line) {
        ExpressionPtr dict = make(ExpressionKind::Dict, line);
        parse_items("}", [&] {
            add_part(*dict, parse_expression());
            expect_operator(":");
            add_part(*dict, parse_expression());
        });
        return dict;
    }

    ExpressionPtr parse_postfix(ExpressionPtr value) {
        for (int steps = 0;; steps++) {
            if (steps > kDeepestSource) refuse_depth();
            const int line = now().line;
            if (take_operator(".")) {
                if (now().kind == TokenKind::Integer) {
                    const Token token = next();
                    value = make_of(ExpressionKind::Item, line, std::move(value),
                                    constant(line, number_of(token)));
                } else {
                    value = make_of(ExpressionKind::Attribute, line, std::move(value));
                    value->text = expect_name();
                }
            } else if (take_operator("[")) {
                value = parse_subscript(std::move(value), line);
            } else if (is_operator("(")) {
                value = parse_call(std::move(value));
            } else {
                return value;
            }
        }
    }
    ExpressionPtr parse_subscript(ExpressionPtr value, int line) {
        ExpressionPtr parts[3];
        bool is_slice = false;
        for (int i = 0; i < 3; i++) {
            if (!is_operator(":") && !is_operator("]")) parts[i] = parse_expression();
            if (!take_operator(":")) break;
            is_slice = true;
        }
        if (is_operator(",")) fail_at(line, "a subscript with commas is not supported");
        expect_operator("]");
        if (!is_slice && !parts[0]) fail_at(line, "a subscript is empty");
        if (!is_slice) return make_of(ExpressionKind::Item, line, std::move(value), std::move(parts[0]));
        return make_of(ExpressionKind::Slice, line, std::move(value), std::move(parts[0]),
                       std::move(parts[1]), std::move(parts[2]));
    }

    // Reads the arguments of a call, filter or test.
    void parse_arguments(Expression& call) {
        std::vector<Argument>& arguments = call.arguments;
        expect_operator("(");
        parse_items(")", [&] {
            Argument argument;
            if (is_operator("*") || is_operator("**")) {
                argument.name = next().text;
            } else if (now().kind == TokenKind::Name && ahead().kind == TokenKind::Operator &&
                       ahead().text == "=") {
                argument.name = next().text;
                next();
            } else if (!arguments.empty() && !arguments.back().name.empty() && arguments.back().name != "*") {
                fail_at(now().line, "an argument without a name follows one with a name");
            }
            argument.value = parse_expression();
            count_depth(call, argument.value.get());
            arguments.push_back(std::move(argument));
        });
    }
    ExpressionPtr parse_call(ExpressionPtr function) {
        ExpressionPtr call = make_of(ExpressionKind::Call, now().line, std::move(function));
        parse_arguments(*call);
        return call;
    }

    ExpressionPtr parse_filters(ExpressionPtr value, bool any) {
        for (int steps = 0; any; steps++) {
            if (steps > kDeepestSource) refuse_depth();
            if (take_operator("|"))
                value = parse_filter(std::move(value));
            else if (value && is_name("is"))
                value = parse_test(std::move(value));
            else if (value && is_operator("("))
                value = parse_call(std::move(value));
            else
                break;
        }
        return value;
    }
    // Reads a filter after its |. Without a value it filters the text of a block.
    ExpressionPtr parse_filter(ExpressionPtr value) {
        const int line = now().line;
        ExpressionPtr filter = make_of(ExpressionKind::Filter, line, std::move(value));
        filter->text = expect_name();
        if (!is_filter(filter->text) && conditions_ == 0) fail_at(line, no_filter(filter->text));
        if (is_operator("(")) parse_arguments(*filter);
        return filter;
    }
    ExpressionPtr parse_test(ExpressionPtr value) {
        next();
        const int line = now().line;
        const bool negated = take_name("not");
        ExpressionPtr test = make_of(ExpressionKind::Test, line, std::move(value));
        test->text = expect_name();
        if (!is_test(test->text) && conditions_ == 0) fail_at(line, no_test(test->text));
        if (is_operator("(")) {
            parse_arguments(*test);
        } else if (begins_argument()) {
            if (is_name("is")) fail_at(line, "tests with `is` cannot be chained");
            test->arguments.push_back({"", parse_postfix(parse_primary())});
            count_depth(*test, test->arguments[0].value.get());
        }
        return negated ? make_of(ExpressionKind::Not, line, std::move(test)) : std::move(test);
    }
    bool begins_argument() const {
        const TokenKind kind = now().kind;
        if (kind == TokenKind::Name) return !is_name("else") && !is_name("or") && !is_name("and");
        return kind == TokenKind::String || kind == TokenKind::Integer || kind == TokenKind::Float ||
               is_operator("[") || is_operator("{");
    }

    const std::vector<Token> tokens_;
    size_t at_ = 0;
    bool has_generation_ = false;
    int depth_ = 0, loops_ = 0;
    int conditions_ = 0;  // inside of an if, unknown filters and tests are refused when they are used
};

}  // namespace jinja
